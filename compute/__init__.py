"""Kernels and bricks: GGUF weights, quantisation, backends and the decoder that runs them."""
