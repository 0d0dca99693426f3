"""What is said between a profiled process, the daemon and its viewers."""
