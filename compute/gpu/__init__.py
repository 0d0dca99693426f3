"""Code that runs on a GPU, through CuPy. Not loaded at import: it need not be installed, and there may be no GPU."""
