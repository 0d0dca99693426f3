"""Resources, occupancy and access patterns of a kernel, read from its machine code."""
