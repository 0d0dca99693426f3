"""Computes results from records and nodes: statistics, roofline, time breakdown and graph.

Viewers use this package, too.
"""
