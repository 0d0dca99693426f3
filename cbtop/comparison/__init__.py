"""Compare two periods of one process, or several runs.

Both comparisons use the same statistics. This package imports no view models.
"""
