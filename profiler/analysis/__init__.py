"""Computes results from records and nodes: statistics, roofline, time breakdown, graph. Viewers use it, too."""
