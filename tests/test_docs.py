"""The documents point at what they speak of."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from anchors import ANCHOR, mended  # noqa: E402


def test_every_equation_stands_on_the_line_named():
    """docs/architectures.md; `python docs/anchors.py --write` mends line numbers."""
    text = (ROOT / "docs" / "architectures.md").read_text()
    assert len(ANCHOR.findall(text)) >= 20
    assert mended(text, ROOT / "src" / "tenuto" / "models") == text
