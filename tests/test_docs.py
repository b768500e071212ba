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


def test_the_readme_runs(capsys):
    """The Python of the README, as it stands there."""
    import re

    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert "'<bos>'" in capsys.readouterr().out


def test_measured_numbers_have_files():
    """Every result file that docs/measurements.md names is there and has what it must."""
    import json
    import re

    named = re.findall(r"results/[\w/.-]+\.json", (ROOT / "docs" / "measurements.md").read_text())
    assert named
    for name in named:
        result = json.loads((ROOT / name).read_text())
        missing = {"recipe", "command", "seed", "commit", "hardware", "seconds", "figures"} - set(result)
        assert not missing, f"{name}: {missing}"


def test_tables_are_what_the_result_files_say():
    """`python docs/tables.py --write` makes them anew."""
    from tables import filled

    for page in (ROOT / "README.md", ROOT / "docs" / "measurements.md"):
        text = page.read_text()
        assert filled(text) == text, page.name
