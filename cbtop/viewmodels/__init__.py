"""Pure functions from the store's data to frozen rows, points and sums, which every view and report draws."""

# None is a number that was not measured; outputs print it as `n/a` (text) or `null` (JSON).
