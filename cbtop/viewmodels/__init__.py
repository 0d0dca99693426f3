"""Pure functions from the store's snapshot to frozen rows, points and sums: what every view and report draws."""
