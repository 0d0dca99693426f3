"""A viewer's end: receives what daemons publish, keeps it, and hands out views of it, live or replayed."""

DEFAULT_WINDOW_S = 10.0  # of the last seconds, where nobody says how many
