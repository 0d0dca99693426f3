"""Compare two periods of a process, or several runs. Both use the same statistics. No view models are imported."""
