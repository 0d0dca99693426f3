"""The option --tuned: replace options by the setting that `cbtop tune` has stored for the model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cbtop.errors import UsageError
from cbtop.tuning.kept import stored_setting
from cbtop.tuning.measuring import Setting


def add_tuned_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--tuned", action="store_true",
        help="with the threads, products and KV cache that cbtop tune has kept for this model on such a processor",
    )  # fmt: skip


def tuned_setting(options: argparse.Namespace, path: Path | None) -> Setting:
    """Return the stored setting of the model at `path`, and print it on stderr. If `path` is None, the model is that
    of the demo.

    Raises UsageError if no setting is stored, or if an option contradicts the setting.
    """
    # Imported here, because Numba loads slowly and is rarely needed without --tuned.
    from cbtop.compute.backends import available_threads
    from cbtop.compute.demo_model import demo_model

    if options.threads or options.exact or options.kv_cache != "f16":
        raise UsageError("--tuned says threads, --exact and --kv-cache: leave it or them away")
    path = path or demo_model(lambda *_: None)
    try:
        found = stored_setting(path, available_threads())
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist") from error
    if found is None:
        raise UsageError(f"nothing is kept for {path.name} on this processor: cbtop tune {path}")
    sys.stderr.write(f"{found.text}\n")
    return found.setting
