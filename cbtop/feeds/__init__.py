"""Feeds answer what a screen or report asks for: views of live processes, of recordings, and of runs."""
