"""Feeds make the views for screens and reports. The data comes from live processes, recordings, or runs."""
