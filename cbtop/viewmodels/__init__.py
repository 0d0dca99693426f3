"""View models: frozen rows, points and sums for views and reports to draw. Pure functions make them from the store's
data.
"""

# None means that a number was not measured. Outputs print it as `n/a` (text) or `null` (JSON).
