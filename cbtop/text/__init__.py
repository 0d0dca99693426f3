"""Write the texts of screens and reports from view models. `cbtop.units` writes numbers and units."""
