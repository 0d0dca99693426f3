"""What Numba kernels are made with: the decorators and their cache, vectors of AVX-512, the exponential."""
