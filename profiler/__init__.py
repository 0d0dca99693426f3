"""Measures and records bricks inside the profiled process. It starts no thread, opens no socket and never blocks."""
