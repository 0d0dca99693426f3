"""Several programs run one after the other in one process, so that torch is imported only once."""

import runpy
from pathlib import Path

NAMES = (
    "save_own_getstate",
    "jit_script_rope",
    "inspect_frames",
    "odd_dataclass",
    "odd_weakref",
    "process_traceback",
)

for name in NAMES:
    print(name, flush=True)
    runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
