"""Feeds make the views for a screen or report. Their data comes from live processes, recordings, or runs."""
