"""Computes statistics, rooflines, time breakdowns and graphs from records and nodes. Viewers use this package,
too.
"""
