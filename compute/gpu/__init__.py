"""Code that runs on a GPU, through CuPy. CuPy is not imported with this package, because CuPy or a GPU may be
missing."""
