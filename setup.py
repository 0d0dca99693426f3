"""Builds the one compiled part. All else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # Optional: without a compiler or Python's headers the same hot path runs in Python.
        Extension("cbtop.profiler._hot_path", ["profiler/_hot_path.c"], extra_compile_args=["-O3"], optional=True)
    ]
)
