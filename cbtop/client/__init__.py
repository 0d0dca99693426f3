"""The viewer side: receives what daemons publish, stores it, and builds views of it, live or replayed."""

DEFAULT_WINDOW_S = 10.0  # default length of the recent window
