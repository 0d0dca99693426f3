"""The subcommands, in the order of `cbtop --help`. Each is a module with `add_arguments` and `run`.

Only the given one is imported, so that a fast command such as `cbtop keys` does not wait for other imports.
"""

# Each subcommand's name, and its line in `cbtop --help`. Its module has `_` for each `-`.
COMMANDS = {
    "demo": "decode a model with instrumented bricks, and watch it",
    "run": "run a program, and show its torch models; the program is not edited",
    "attach": "attach to a Python process with torch that runs already",
    "ls": "list what runs, on one host or several",
    "record": "record what runs into a file",
    "replay": "show a recording",
    "diff": "compare two runs, by brick and layer",
    "check": "fail if a run is slower than its baseline, or over its budgets: for CI",
    "bisect": "find the commit that made a program slower, and the brick that it slowed down",
    "export": "convert a recording for other tools",
    "kernels": "record the GPU kernels of a few steps, and list them by brick",
    "map": "list the kernels of a model by layer and brick, with their source files",
    "ptx": "analyse PTX, or show the PTX of a kernel by its hash",
    "post-mortem": "show what a process was doing when it ended",
    "llama-server": "show a running llama-server: tokens/s and requests, without bricks",
    "daemon": "publish what runs to several viewers",
    "keys": "manage the keys of viewers on other machines",
    "bench": "measure tokens/s of a model, as llama-bench does",
    "tune": "find the fastest settings for a model",
    "verify": "check every kernel against its reference, and every check against planted faults",
    "contracts": "check contract files of your own bricks",
    "calibrate": "measure and store the roofs of this machine's processor and GPUs",
    "overhead": "measure what profiling costs on this machine",
    "doctor": "check what profiling needs on this machine",
    "completion": "print a script for shell completion",
    "man": "print the manual page",
}
DEFAULT_COMMAND = "top"
# Commands that need the packages of the extra `compute`. Some options of other commands need these packages, too.
NEED_ENGINE = frozenset({"demo", "bench", "tune", "verify", "contracts", "overhead"})
