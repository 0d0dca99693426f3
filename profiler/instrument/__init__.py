"""Makes an unedited torch process a profiled one: what its modules are, and when they began and ended."""
