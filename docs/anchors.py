"""Keeps the line numbers in architectures.md true: `python docs/anchors.py` checks, `--write` mends them.

A row of a table ends in `file.py:LINE` and the code that stands there, each in backquotes.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ANCHOR = re.compile(r"`(?P<file>[\w/]+\.py):(?P<line>\d+)` \| `(?P<code>[^`]+)`")


def mended(text: str, source: Path) -> str:
    """The text with every anchor's line set to where its code stands; ValueError if it stands nowhere or twice."""

    def mend(match: re.Match) -> str:
        lines = (source / match["file"]).read_text().splitlines()
        found = [number for number, line in enumerate(lines, 1) if match["code"] in line]
        if len(found) != 1:
            raise ValueError(
                f"{match['code']!r} stands {len(found)} times in {match['file']}; it must be once."
            )
        return f"`{match['file']}:{found[0]}` | `{match['code']}`"

    return ANCHOR.sub(mend, text)


if __name__ == "__main__":
    page = DOCS / "architectures.md"
    before = page.read_text()
    after = mended(before, DOCS.parent / "src" / "tenuto" / "models")
    if "--write" in sys.argv:
        page.write_text(after)
    elif before != after:
        sys.exit("docs/architectures.md points at wrong lines; run python docs/anchors.py --write")
