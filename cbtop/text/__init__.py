"""Write the texts of screens and reports from view models.

(Numbers and units are written by `cbtop.units`.)
"""
