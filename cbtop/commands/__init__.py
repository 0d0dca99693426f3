"""The subcommands, in the order of `cbtop --help`. Each is a module with `add_arguments` and `run`.

Only the given one is imported, so that a fast command such as `cbtop keys` does not wait for other imports.
"""

# Each subcommand's name, and its line in `cbtop --help`. Its module has `_` for each `-`.
COMMANDS = {
    "demo": "decode a model with instrumented bricks, and watch it",
    "run": "start a program whose torch models are shown, without a change to it",
    "ls": "list what runs, on one host or several",
    "record": "record what runs into a file",
    "replay": "show a recording",
    "diff": "compare two runs, by brick and layer",
    "check": "fail where a run is slower than its baseline, or over its budgets: for CI",
    "bisect": "find the commit that made a program slower, and the brick that it slowed down",
    "export": "write what was recorded for other tools",
    "kernels": "which kernels run for each brick on a GPU, recorded for a few steps",
    "map": "which kernels a model runs, by layer and brick, and where each is written",
    "ptx": "analyse PTX, and show the PTX of a kernel by the hash that a tree names",
    "post-mortem": "what a process was doing when it ended",
    "daemon": "serve what runs to many viewers",
    "keys": "who may listen from another machine",
    "bench": "measure tokens/s of a model, as llama-bench does",
    "tune": "find the setting that a model runs fastest with, from its measured bricks",
    "verify": "check every kernel against its reference, and every check against planted faults",
    "calibrate": "measure the roofs of this machine's processor and GPUs, and keep them",
    "overhead": "measure what profiling costs on this machine",
    "doctor": "say what profiling finds on this machine, and what is missing",
    "completion": "print the script that completes commands and options in a shell",
}
DEFAULT_COMMAND = "top"
# Commands that need the packages of the extra `compute`. Some options of other commands need these packages, too.
NEED_ENGINE = frozenset({"demo", "bench", "tune", "verify", "overhead"})
