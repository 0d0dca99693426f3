"""Compare real programs with and without cbtop, and compare cbtop's times with times measured by torch alone.

python -m benchmarks real [NAME ...] [--seconds S] [--pairs N] [--turns N] [--overhead PERCENT]
"""
