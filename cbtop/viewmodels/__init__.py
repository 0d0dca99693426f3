"""View models.

Pure functions convert the store's data to frozen rows, points and sums, which views and reports draw.
"""

# None is a number that was not measured. Outputs print it as `n/a` (text) or `null` (JSON).
