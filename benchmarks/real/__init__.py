"""Real programs beside themselves without cbtop, and beside times that torch's own hooks and profiler give.

python -m benchmarks real [NAME ...] [--seconds S] [--rounds N]
"""
