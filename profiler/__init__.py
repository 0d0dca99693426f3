"""Measures and records bricks inside the profiled process: no thread, no socket, nothing that can block."""
