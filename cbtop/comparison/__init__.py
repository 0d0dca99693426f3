"""Compares two periods of a process, or several runs, with one model of a change. Does not import view models."""
