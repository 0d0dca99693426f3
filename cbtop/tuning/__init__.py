"""Tune the settings of a model: measure them in turns, compare them, and keep the faster one."""
