"""The viewer's side of the protocol: receives the messages of daemons, and stores their data."""

DEFAULT_WINDOW_S = 10.0  # default length of the recent window, in seconds
