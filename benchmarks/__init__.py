"""Benchmarks of the cost of cbtop itself. Each figure is a ratio to a peer, or to a limit that was measured in the
same run.
"""
