"""The viewer side of the wire: receives what daemons publish, and stores it."""

DEFAULT_WINDOW_S = 10.0  # default length of the recent window, in seconds
