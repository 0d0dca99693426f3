"""Compare two periods of one process, or several runs, with the same statistics. Imports no view models."""
