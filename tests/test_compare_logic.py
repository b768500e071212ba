"""`tenuto compare` for logical inference: cells by protocol, the table, every reading of the tests noted."""

import json

import numpy as np
import pytest
import yaml

from tenuto.cli import main
from tenuto.data import logical_inference as li
from tenuto.evaluate import load, predict

RECIPE = {
    "preset": "ut-tiny",
    "config": {
        "hidden_size": 16,
        "num_loops": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "type_vocab_size": 2,
        "classifier_pooling": "pair",
    },
    "data": {"max_operators": 1},
    "training": {"max_steps": 2, "per_device_train_batch_size": 8, "save_steps": 2},
}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A plan's file; the tests are cut to 25 pairs of each set."""
    from tenuto import compare_logic

    whole = compare_logic.test_sets
    monkeypatch.setattr(
        compare_logic,
        "test_sets",
        lambda recipe, names=(): {name: pairs[:25] for name, pairs in whole(recipe, names).items()},
    )
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(RECIPE))
    settings = {
        "base": str(tmp_path / "base.yaml"),
        "against": "halting",
        "seeds": [0, 1],
        "generated": 30,
        "rows": {
            "halting": {"protocols": ["length", "A"]},
            "fixed depth": {"config": {"policy": "fixed", "act_weight": 0.0}, "seeds": [1]},
        },
    }

    def write(**changes):
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**settings, **changes}, sort_keys=False))
        return str(tmp_path / "plan.yaml")

    return write


def test_cells_by_protocol_and_the_table(plan, tmp_path, capsys):
    from tenuto.compare import run_comparison

    output = tmp_path / "rows"
    figures = run_comparison(plan(), output)
    assert figures["cells"] == figures["done"] == 5
    assert {path.name for path in output.iterdir() if path.is_dir()} == {
        "halting-length-0", "halting-length-1", "halting-A-0", "halting-A-1", "fixed-depth-length-1"
    }  # fmt: skip
    cells = {(one["row"], one["protocol"], one["seed"]): one for one in figures["results"]}
    halting, fixed = figures["rows"]
    assert list(halting["sets"]) == [
        "validation", *"7 8 9 10 11 12".split(), "generated", "validation A", "A", "generated A"
    ]  # fmt: skip
    here = [cells["halting", "length", seed]["quality"]["9"]["accuracy"] for seed in (0, 1)]
    assert halting["sets"]["9"]["accuracy"]["mean"] == pytest.approx(np.mean(here), abs=1e-3)
    assert halting["sets"]["9"]["seeds"] == 2 and fixed["sets"]["9"]["seeds"] == 1
    gap = cells["fixed depth", "length", 1]["quality"]["12"]["accuracy"]
    gap -= cells["halting", "length", 1]["quality"]["12"]["accuracy"]
    minus = fixed["sets"]["12"]["minus_against"]
    assert minus["mean"] == pytest.approx(gap, abs=1e-3) and minus["seeds"] == 1
    assert "minus_against" not in halting["sets"]["12"] and fixed["sets"]["12"]["mean_steps"] == 2.0
    # the figures are those of the trained model, protocol A's of the one that never saw its pattern
    loaded = load(output / "halting-A-1")
    assert loaded.recipe.data.protocol == "A"
    pairs = li.protocol("A").test["A"][:25]
    said = predict(loaded, pairs)
    cell = cells["halting", "A", 1]
    assert cell["quality"]["A"]["accuracy"] == pytest.approx(said.accuracy(pairs), abs=1e-3)
    assert sum(row["pairs"] for row in cell["errors"]["A"]["relation"].values()) == 25
    # each reading of the tests is on record, and done cells are not read again
    run_comparison(plan(), output)
    assert [len(one["readings"]) for one in figures["results"]] == [1] * 5
    again = run_comparison(plan(generated=20), output)
    assert [len(one["readings"]) for one in again["results"]] == [2] * 5
    noted = json.loads((output / "halting-A-0" / "readings.json").read_text())
    assert [one["sets"] for one in noted] == [["validation", "A", "generated"]] * 2
    capsys.readouterr()
    assert main(["compare", plan(generated=20), "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "always #" in shown and "minus halting, points" in shown and "5 of 5 models" in shown


def test_bad_plans_are_refused_in_one_sentence(plan):
    from tenuto.compare import Comparison, cells_of, load_plan

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            cells_of(load_plan(plan(**changes), Comparison))

    refused("beams has nothing to set for rows of", beams=4)
    refused("generated=-5 must not be negative", generated=-5)
    refused(r"Row halting: \['A', 'A'\] names something twice", protocols=["A", "A"], rows={"halting": {}})
    refused(r"Row fixed: \[2, 2\] names something twice", rows={"halting": {}, "fixed": {"seeds": [2, 2]}})
    refused("There is no protocol 'D'; they are length, A, B, C", protocols=["D"], rows={"halting": {}})
    text = {"base": "recipes/algorithmic/lookup.yaml", "generated": 0, "against": "a"}
    refused("Row a: protocols has nothing to set for rows", rows={"a": {"protocols": ["A"]}}, **text)
    refused("generated has nothing to set for rows", rows={"a": {}}, **{**text, "generated": 5})
