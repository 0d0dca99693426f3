"""Compare real programs with and without cbtop, and with times that torch alone gives.

python -m benchmarks real [NAME ...] [--seconds S] [--rounds N]
"""
