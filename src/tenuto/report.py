"""`tenuto report`: the measurements on a checkpoint, and one self-contained HTML page that shows them."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

THRESHOLDS = (0.999, 0.99, 0.9, 0.7, 0.5, 0.3, 0.1)


def made_by(checkpoint: str | Path) -> dict[str, Any]:
    """Recipe, seed and command of a checkpoint: from its result file, or made up from its recipe."""
    import yaml

    folder = Path(checkpoint)
    result, recipe = folder / "result.json", folder / "recipe.yaml"
    if result.is_file():
        return json.loads(result.read_text())
    return {
        "recipe": str(recipe),
        "seed": yaml.safe_load(recipe.read_text())["training"].get("seed", 0),
        "command": shlex.join(["tenuto", "train", str(recipe), "--output", str(folder)]),
    }


def _wilson(right: int, total: int) -> tuple[float, float]:
    """95% interval of a share, in percent."""
    z, share = 1.96, right / total
    middle = share + z * z / (2 * total)
    half = z * (share * (1 - share) / total + z * z / (4 * total * total)) ** 0.5
    return tuple(round(100 * (middle + sign * half) / (1 + z * z / total), 2) for sign in (-1, 1))


def _score(rows: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Accuracy of (truth, answer) rows beside the share of `#`, in percent."""
    right = sum(truth == answer for truth, answer in rows)
    return {
        "pairs": len(rows),
        "accuracy": round(100 * right / len(rows), 2),
        "interval": _wilson(right, len(rows)),
        "always_independent": round(100 * sum(truth == "#" for truth, _ in rows) / len(rows), 2),
    }


def measure(
    checkpoint: str | Path, limit: int = 500, thresholds: Sequence[float] = THRESHOLDS, repeats: int = 2
) -> dict[str, Any]:
    """Everything that the report shows, as plain numbers.

    At most `limit` pairs of each test set and 3 x `limit` of the validation set are looked at; the knob is
    turned on test pairs only.
    """
    from dataclasses import asdict

    from .data.logical_inference import RELATIONS, decode
    from .data.pairs import PairDataset
    from .depths import KINDS, describe
    from .evaluate import full_depth, knob, load, predict, test_sets
    from .expert_usage import expert_usage

    loaded = load(checkpoint)
    names = list(test_sets(loaded.recipe))
    every = test_sets(loaded.recipe, ["validation", *names])
    # the validation set spans seven operator counts, a test set one
    room = {name: 3 * limit if name == "validation" else limit for name in every}
    sets = {name: Random(0).sample(group, min(room[name], len(group))) for name, group in every.items()}
    pairs = [one for group in sets.values() for one in group]
    tests = {name: sets[name] for name in names}
    said = predict(loaded, pairs, progress="accuracy and depth")
    full, config = full_depth(loaded.model), loaded.model.config
    answers = [RELATIONS[one] if one >= 0 else "?" for one in said.relations]
    by_operators, by_relation, by_kind, steps = (defaultdict(list) for _ in range(4))
    data = PairDataset(pairs, loaded.recipe.head)
    for number, (pair, answer) in enumerate(zip(pairs, answers, strict=True)):
        key = "12+" if pair.operators >= 12 else str(pair.operators)
        by_operators[key].append((pair.relation, answer))
        by_relation[pair.relation].append((pair.relation, answer))
        steps[key].append(said.depths[number])
        for token, step in zip(decode(data[number]["ids"]), said.depths[number], strict=True):
            by_kind[KINDS[token]].append(step)
    order = sorted(by_operators, key=lambda key: int(key.rstrip("+")))
    relations = {}
    for one in RELATIONS:
        wrong = Counter(answer for truth, answer in by_relation[one] if truth != answer)
        if by_relation[one]:
            relations[one] = {**_score(by_relation[one]), "taken_for": dict(wrong.most_common(2))}
    looked_at = sum(len(group) for group in sets.values())
    training = Path(checkpoint) / "training.json"
    halting = getattr(config, "policy", "fixed") != "fixed"
    routers = max(config.attention_experts, config.ffn_experts) > 1
    return {
        "checkpoint": str(checkpoint),
        "preset": loaded.recipe.preset or loaded.recipe.start,
        "architecture": _spoken(type(loaded.model).__name__),
        "head": loaded.recipe.head,
        "protocol": loaded.recipe.data.protocol,
        "trained_operators": loaded.recipe.data.max_operators,
        "recipe": asdict(loaded.recipe),
        "command": made_by(checkpoint)["command"],
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "full_depth": full,
        "halting": halting,
        "limit": limit,
        "pairs": {name: [len(group), len(every[name])] for name, group in sets.items()},
        "training": json.loads(training.read_text()) if training.is_file() else {"history": []},
        "sets": {
            name: _score([row for row, one in zip(zip([p.relation for p in pairs], answers, strict=True),
                                                  _owners(sets), strict=True) if one == name])
            for name in sets
        },
        "by_operators": {key: {
                **_score(by_operators[key]),
                **describe(np.concatenate(steps[key]), full),
            } for key in order},
        "by_relation": relations,
        "by_kind": {
            kind: describe(np.array(by_kind[kind]), full) for kind in dict.fromkeys(KINDS.values()) if by_kind[kind]
        },
        "depth": describe(np.concatenate(said.depths), full),
        "knob": knob(loaded, tests, thresholds, repeats) if halting else None,
        "experts": expert_usage(checkpoint, ["validation", *names], looked_at) if routers else None,
        "examples": _examples(pairs, answers, said.depths, data),
    }  # fmt: skip


def _spoken(name: str) -> str:
    """SparseUniversalTransformerForX -> Sparse Universal Transformer."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.partition("For")[0])


def _owners(sets: dict[str, list]) -> list[str]:
    return [name for name, group in sets.items() for _ in group]


def _examples(pairs, answers, depths, data) -> list[dict[str, Any]]:
    """A right pair (not `#` if possible) of usual length for each of five operator counts; a wrong one."""
    from .data.logical_inference import decode

    counts = sorted({pair.operators for pair in pairs if 2 <= pair.operators <= 12})
    wanted = [counts[place] for place in np.linspace(0, len(counts) - 1, min(5, len(counts))).astype(int)]
    usual = {count: np.median(data.lengths[data.operators == count]) for count in counts}

    def best(right: bool, among: Sequence[int]) -> list[int]:
        found = [n for n, pair in enumerate(pairs) if pair.operators in among]
        found = [n for n in found if (answers[n] == pairs[n].relation) == right]
        found = [n for n in found if pairs[n].relation != "#"] or found
        return sorted(found, key=lambda n: abs(data.lengths[n] - usual[pairs[n].operators]))[:1]

    chosen = [n for count in dict.fromkeys(wanted) for n in best(True, [count])]
    chosen += best(False, wanted) or best(False, counts)
    return [
        {
            "tokens": decode(data[n]["ids"]),
            "steps": depths[n].tolist(),
            "relation": pairs[n].relation,
            "answer": answers[n],
            "operators": pairs[n].operators,
        }
        for n in chosen
    ]


def write_report(figures: dict[str, Any], path: str | Path, live: dict[str, Any] | None = None) -> Path:
    """Writes the page about `measure`'s figures; `live` adds a demo's own training curve."""
    from .page import page

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(figures, live), encoding="utf-8")
    return path
