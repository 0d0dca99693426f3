"""Data for programs: the tables of a recording, and snapshots of running processes."""
