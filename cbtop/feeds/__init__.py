"""Feeds build the views that a screen or report shows, from live processes, recordings, or runs."""
