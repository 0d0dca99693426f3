"""Build the six compiled parts of cbtop. The rest of the configuration is in pyproject.toml."""

import numpy as np
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "cbtop.profiler._hot_path",
            ["profiler/_hot_path.c"],
            depends=["profiler/_counters.h", "profiler/_library_calls.h", "profiler/_model_steps.h"],
            include_dirs=[np.get_include()],
            # -fno-plt: call functions of Python directly by their addresses, without a jump table. Starting and
            # stopping a brick is 2 % faster with it.
            extra_compile_args=["-O3", "-fno-plt"],
            # Without a compiler or Python's headers, the part is not built, and the same hot path runs in Python.
            optional=True,
        ),
        Extension(
            "cbtop.profiler._kernel_records",
            ["profiler/_kernel_records.c"],
            extra_compile_args=["-O2"],
            optional=True,  # Without the compiled part, the records are read in Python.
        ),
        Extension("cbtop.profiler._llama_cpp", ["profiler/_llama_cpp.c"], extra_compile_args=["-O2"], optional=True),
        Extension(
            "cbtop.compute.contracts._conditions",
            ["compute/contracts/_conditions.c"],
            include_dirs=[np.get_include()],
            # -ffp-contract=off: results are the same on each kind of processor, because operations are not
            # contracted. -funroll-loops: conditions on rows take 0.7 of the time that they take without it.
            extra_compile_args=["-O3", "-funroll-loops", "-ffp-contract=off"],
            optional=True,  # Without the compiled part, NumPy evaluates each condition.
        ),
        # Without the compiled part, no frames are sampled in the time outside of bricks.
        Extension(
            "cbtop.profiler._cpu_sampler", ["profiler/_cpu_sampler.c"], extra_compile_args=["-O2"], optional=True
        ),
        Extension("cbtop.profiler._stamps", ["profiler/_stamps.c"], extra_compile_args=["-O2"], optional=True),
        Extension(
            "cbtop.profiler._vectorcalls",
            ["profiler/_vectorcalls.c"],
            include_dirs=[np.get_include()],
            extra_compile_args=["-O2"],
            optional=True,  # Without the compiled part, only functions written in Python are timed.
        ),
    ]
)
