"""Builds the three compiled parts. All else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "cbtop.profiler._hot_path",
            ["profiler/_hot_path.c"],
            depends=["profiler/_model_steps.h"],
            # Calls into Python go by its addresses at once, not by a table of jumps: a start/stop pair saves 2 %.
            extra_compile_args=["-O3", "-fno-plt"],
            optional=True,  # without a compiler or Python's headers the same hot path runs in Python
        ),
        Extension("cbtop.profiler._llama_cpp", ["profiler/_llama_cpp.c"], extra_compile_args=["-O2"], optional=True),
        Extension("cbtop.profiler._stamps", ["profiler/_stamps.c"], extra_compile_args=["-O2"], optional=True),
    ]
)
