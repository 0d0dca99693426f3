"""Code that runs on a GPU, through CuPy.

Importing this package does not import CuPy, because CuPy or a GPU may be missing.
"""
