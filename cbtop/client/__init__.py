"""The viewer side of the protocol. It receives the messages of daemons and stores their data."""

DEFAULT_WINDOW_S = 10.0  # default length of the recent window, in seconds
