"""What cbtop costs on a CUDA device: run by hand, where there is one."""
