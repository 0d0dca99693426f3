"""`python -m cbtop` is `cbtop`."""

from __future__ import annotations

import sys

from cbtop.cli import main

sys.exit(main())
