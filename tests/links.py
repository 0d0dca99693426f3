"""Check the relative links of the pages: their file and heading must exist. `make lint` runs this.

    python -m tests.links   print each broken link; exit code 1 if there is one

Links to other sites are not followed, so that no network is needed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *DOCS]


def prose(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    last: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        last[anchor] = last.get(anchor, -1) + 1
    return {anchor + (f"-{number}" if number else "") for anchor, most in last.items() for number in range(most + 1)}


def broken_links(page: Path) -> Iterator[str]:
    """Yield each relative link of a page whose file or heading does not exist."""
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors(target):
            yield f"{link}: no such heading"


def main() -> int:
    """Print the broken links of all pages. Returns the exit code."""
    broken = [f"{page.relative_to(ROOT)}: {link}" for page in PAGES for link in broken_links(page)]
    sys.stdout.writelines(f"{line}\n" for line in broken or [f"{len(PAGES)} pages: every link leads somewhere"])
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
