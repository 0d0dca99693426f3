"""Measure settings of a model in turns, compare them, and keep the faster one."""
