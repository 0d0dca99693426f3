"""Whether the screen of this process is drawn in a browser."""

import os


def is_in_browser() -> bool:
    """Return whether textual-serve or `cbtop --web` started this process. Its stdin and stdout are pipes, then."""
    return bool(os.environ.get("TEXTUAL_DRIVER"))
