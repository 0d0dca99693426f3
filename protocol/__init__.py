"""The protocol between a profiled process, the daemon and its viewers."""
