"""Compares: one model of a change, between two periods of a process or between runs. Reads no viewmodel."""
