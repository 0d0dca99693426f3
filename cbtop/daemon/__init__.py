"""The daemon: reads the rings of this machine, publishes them, keeps a history, and what ended processes left."""
