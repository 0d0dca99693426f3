"""The screen in a browser of this machine: an HTTP server on loopback, by textual-serve."""
