"""What programs read: the tables of a recording, and snapshots of what runs."""
