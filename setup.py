"""Builds the five compiled parts. The rest of the configuration is in pyproject.toml."""

import numpy as np
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "cbtop.profiler._hot_path",
            ["profiler/_hot_path.c"],
            depends=["profiler/_model_steps.h"],
            # -fno-plt: call functions of Python directly by their addresses, without a jump table. This makes a
            # start/stop pair 2 % faster.
            extra_compile_args=["-O3", "-fno-plt"],
            optional=True,  # without a compiler or Python's headers, the same hot path runs in Python
        ),
        Extension(
            "cbtop.profiler._kernel_records",
            ["profiler/_kernel_records.c"],
            extra_compile_args=["-O2"],
            optional=True,  # without it, the records are read in Python
        ),
        Extension("cbtop.profiler._llama_cpp", ["profiler/_llama_cpp.c"], extra_compile_args=["-O2"], optional=True),
        Extension(
            "cbtop.compute.contracts._conditions",
            ["compute/contracts/_conditions.c"],
            include_dirs=[np.get_include()],
            # -ffp-contract=off: without contracted operations, results are the same on each kind of processor.
            # -funroll-loops: conditions on rows take 0.7 of the time.
            extra_compile_args=["-O3", "-funroll-loops", "-ffp-contract=off"],
            optional=True,  # without it, NumPy evaluates each condition
        ),
        Extension("cbtop.profiler._stamps", ["profiler/_stamps.c"], extra_compile_args=["-O2"], optional=True),
    ]
)
