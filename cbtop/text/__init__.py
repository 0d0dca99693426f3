"""Writes the text of screens and reports from viewmodels. `cbtop.units` writes numbers and units."""
