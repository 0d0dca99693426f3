"""Count phrases that make a reader read a sentence twice. `make lint` runs this; its limits only fall.

    python -m tests.words                   exit code 1 if a limit is exceeded
    python -m tests.words PATH [PATH ...]   print each sentence with two such phrases or more

A phrase by itself is no error. Above about six in 1,000 words a reader stumbles.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# Phrases per 1,000 words. Lower a limit when its count falls.
LIMITS = {
    ("cbtop", "compute", "profiler", "protocol"): 1.2,
    ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs"): 2.2,
}
PHRASES = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"(?:^|[.:;] )Of [^.:;]{3,80}",  # a sentence that begins with "Of"
        # a clause as subject
        r"(?:^|[.:;] )(?:What|Who|Whose|Whoever|Which|How) (?!is |are |was |were |to )[^.?;]{3,}",
        r"\b(?:(?:of|by|in|with|for|to|from) which|of whom|whose|that of|those of)\b",
        r"\b(?:is|are|was|were|be|been) (?:said|told|asked|wanted|meant|held against)\b",
        r"\b(?:is|are|was|were) (?:no|none)\b",
        r"\b(?:no more|any more|as far as|so many|so long|as long as it|so far)\b",
        r"\b(?:but for|, but (?:a|the|those|that|what|of|for|where)|and no more|all but)\b",
        r"\b(?:beside|behind|stands?|stood|lies|lay|lie)\b",
        r"\b(?:is another|are others|of another|an other|of others|others are)\b",
        r"\b(?:nobody|somebody|anybody|whoever)\b",
        r", for (?:it|they|a|the|what|of|that|those|each|there)\b",  # for "because"
        r"\b[Ww]here (?:it|that|there|this|they|a|the|one|nobody|nothing|both|no|all|its|these|those)\b",  # for "if"
    )
)
DIRECTIVE = re.compile(r"(noqa|type:|fmt:|isort|pragma)")


def words_of(text: str) -> int:
    return len(re.findall(r"[A-Za-z']+", text))


def phrases_of(text: str) -> int:
    return sum(len(phrase.findall(text)) for phrase in PHRASES)


def texts_of(path: Path) -> Iterator[str]:
    """Return the paragraphs of a page, or the docstrings and comments of a Python file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from re.split(r"\n\s*\n", re.sub(r"```.*?```", "", source, flags=re.DOTALL))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
    comment, last_row = "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("#").strip()
        if token.type != tokenize.COMMENT or DIRECTIVE.match(text):
            continue
        if token.start[0] != last_row + 1:
            yield comment
            comment = ""
        comment, last_row = f"{comment} {text}", token.start[0]
    yield comment


def files_in(places: Iterable[str]) -> Iterator[Path]:
    for place in map(Path, places):
        for path in [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.md")]):
            if not any(part.is_symlink() for part in path.parents):
                yield path


def rate_of(places: Iterable[str]) -> float:
    """Return the phrases in 1,000 words."""
    texts = [text for path in files_in(places) for text in texts_of(path)]
    return 1000 * sum(map(phrases_of, texts)) / max(1, sum(map(words_of, texts)))


def main(places: Sequence[str]) -> int:
    for path in files_in(places):
        for text in texts_of(path):
            for sentence in re.split(r"(?<=[.!?])\s+", text):
                if sum(bool(phrase.search(sentence)) for phrase in PHRASES) > 1:
                    sys.stdout.write(f"{path}: {' '.join(sentence.split())}\n")
    if places:
        return 0
    exceeded = 0
    for group, limit in LIMITS.items():
        rate = rate_of(group)
        exceeded |= rate > limit
        sys.stdout.write(
            f"{', '.join(group)}: {rate:.1f} hard phrases in 1,000 words, at most {limit:g} are allowed\n"
        )
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
