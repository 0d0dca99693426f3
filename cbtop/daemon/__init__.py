"""The daemon: reads and publishes the rings of this machine. It keeps a history and the data of ended processes."""
