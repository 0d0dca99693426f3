"""The directory that `cbtop run` puts first on PYTHONPATH."""
