"""Writes the text of screens and reports. Numbers and units are written by `cbtop.units`."""
