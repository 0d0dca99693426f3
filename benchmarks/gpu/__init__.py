"""The cost of cbtop on a CUDA device: run by hand, if there is one."""
