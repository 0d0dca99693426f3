"""The daemon: reads the rings of this machine, publishes them, and keeps a history and ended processes' data."""
