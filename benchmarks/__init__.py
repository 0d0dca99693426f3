"""Benchmarks of the cost of cbtop itself. Each figure is a ratio to a peer or to a limit measured in the same run."""
