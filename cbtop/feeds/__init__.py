"""Feeds make the views that a screen or report shows. Their data comes from live processes, recordings, or runs."""
