"""What cbtop costs on a CUDA device, and how right its brick times are there: run by hand, on a machine that has one."""
