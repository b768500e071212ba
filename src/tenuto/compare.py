"""Rows x seeds: models that differ in a few fields, trained on the same data and measured alike; resumes after a kill.

Every cell is a folder as in matrix.py. A row may begin from a checkpoint of its own (`tenuto convert`), so that
architectures made from one pretrained model stand side by side. Language models are measured here, models of sequences
and parallel text in compare_pairs.py, of logical inference in compare_logic.py; of problems with a known depth,
compare_problems.py has what is more than that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from .collapse import collapse
from .compare_problems import measure_problems, problems_lines
from .data.logical_inference import SPLITS
from .matrix import Cell, load_plan, run_cells, varied
from .recipe import Recipe, Schedule, load_recipe
from .shift import shift


@dataclass
class Row:
    """What distinguishes one model. preset, start, convert, learning_rates, lora: as in a recipe, instead of the base
    recipe's; config, schedule: fields over the base recipe's.

    base: another recipe of the same data, in place of the plan's. seeds, protocols: of this row alone; by default the
    plan's.
    """

    base: str | None = None
    preset: str | None = None
    start: str | None = None
    convert: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, float] = field(default_factory=dict)
    learning_rates: dict[str, float] | None = None
    lora: dict[str, Any] | None = None
    seeds: list[int] | None = None
    protocols: list[str] | None = None


@dataclass
class Comparison:
    """base: the recipe of every row. against: the row that the others are compared with, seed by seed.

    Of language models, capacities: at which routed models are measured, beside the config's own; thresholds: at which
    halting ones are, beside every fixed depth. sets: of problems, the test sets measured as well; of sequences or
    parallel text the parts measured, validation and all tests when left out; beams, length_penalty: of the search;
    limit: the first so many examples of each, all when left out. Of logical inference, protocols: a model for each, the
    recipe's when left out; generated: pairs of the exact generator measured beside the tests.
    """

    base: str
    rows: dict[str, Row]
    against: str
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    capacities: list[float] = field(default_factory=list)
    thresholds: list[float] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    beams: int = 1
    length_penalty: float = 1.0
    limit: int | None = None
    protocols: list[str] = field(default_factory=list)
    generated: int = 0


def of_pairs(recipe: Recipe) -> bool:
    """Whether a recipe trains on sequences or parallel text."""
    return recipe.data.sequences is not None or recipe.data.parallel is not None


def of_logic(recipe: Recipe) -> bool:
    """Whether a recipe trains on logical inference."""
    return recipe.head != "causal" and not of_pairs(recipe)


def cells_of(plan: Comparison, overrides: Sequence[str] = ()) -> list[Cell]:
    """Every cell with its recipe, checked before anything is trained; `overrides` change keys of every row's recipe."""
    if plan.against not in plan.rows:
        raise ValueError(f"against={plan.against!r} is no row; they are {', '.join(plan.rows)}.")
    cells, base = [], load_recipe(plan.base, overrides)
    if of_pairs(base):
        own = ("sets", "limit", "beams", "length_penalty")
    elif of_logic(base):
        own = ("protocols", "generated")
    else:
        own = ("capacities", "thresholds", *(["sets"] if base.data.algorithmic is not None else []))
    for one in fields(Comparison):
        asked = getattr(plan, one.name)
        if one.name not in ("base", "rows", "against", "seeds", *own) and asked and asked != one.default:
            raise ValueError(f"{one.name} has nothing to set for rows of {plan.base}.")
    if plan.limit is not None and plan.limit < 1:
        raise ValueError(f"limit={plan.limit} must be at least 1; without it sets are measured whole.")
    if plan.generated < 0:
        raise ValueError(f"generated={plan.generated} must not be negative.")
    for name, row in plan.rows.items():
        for several in (row.seeds or plan.seeds, row.protocols or plan.protocols):
            if len({*several}) < len(several):
                raise ValueError(f"Row {name}: {several} names something twice; a model is trained once.")
        started = load_recipe(row.base or plan.base, overrides)
        if started.data != base.data:
            raise ValueError(
                f"Row {name}: {row.base} has other data than {plan.base}; rows train on the same."
            )
        if row.preset is not None or row.start is not None:
            started.preset, started.start, started.convert = row.preset, row.start, {}
        for part in ("convert", "learning_rates", "lora"):
            if getattr(row, part) is not None:
                setattr(started, part, getattr(row, part))
        unknown = sorted(set(row.schedule) - {one.name for one in fields(Schedule)})
        if unknown:
            raise ValueError(f"Row {name}: schedule has no field {unknown[0]}.")
        started.schedule = replace(started.schedule, **row.schedule)
        folder = re.sub(r"[^\w.]+", "-", name).strip("-")
        if row.protocols and not of_logic(base):
            raise ValueError(f"Row {name}: protocols has nothing to set for rows of {plan.base}.")
        splits = (row.protocols or plan.protocols or [base.data.protocol]) if of_logic(base) else [None]
        for split in splits:
            labels, stem = {"row": name}, folder
            if split is not None:
                if split not in ("length", *SPLITS):
                    raise ValueError(f"There is no protocol {split!r}; they are length, {', '.join(SPLITS)}.")
                labels["protocol"], stem = split, f"{folder}-{split}"
                started.data = replace(started.data, protocol=split)
            for seed in plan.seeds if row.seeds is None else row.seeds:
                cells.append(
                    Cell(f"{stem}-{seed}", {**labels, "seed": seed}, varied(started, row.config, seed))
                )
    return cells


def measure_cell(
    folder: Path, capacities: list[float], thresholds: list[float], sets: list[str] | None = None
) -> dict[str, Any]:
    """Held-out figures of a trained cell: by its own rule; of a routed one also by every other rule and capacity, and
    how well its layers' causal routers foretell Top-K; of a looped one its depths, and how they went in training; of
    problems every setting by set.
    """
    from .evaluate import load
    from .language import corpus_of, measure, realised, summary
    from .language_sweep import sweep_language

    loaded = load(folder)
    # problems: those of the trained depths
    names = [] if loaded.recipe.data.text is not None else ["validation"]
    model, corpus = loaded.model, corpus_of(loaded, names)
    said = measure(model, corpus)
    figures = summary(corpus, said)
    kept = ("loss", "bits_per_byte", "accuracy", "macs_per_token", "seconds")
    result: dict[str, Any] = {name: figures[name] for name in kept if name in figures}
    routed = getattr(model.config, "routed_layers", None)
    if routed:
        result["rules"], ran = [], {}
        own = model.config.capacity
        # a variable capacity has no number: the model's own rules are asked without one
        variable = getattr(model.config, "stt_capacity", "fixed") == "variable"
        asked = [(rule, own) for rule in ("threshold", "running", "topk")] + [("dense", 1.0)]
        asked += [("threshold", one) for one in capacities if one != own]
        for rule, capacity in asked:
            alone = rule == "dense" or (variable and capacity == own and rule != "running")
            knobs = {"selection": rule} if alone else {"selection": rule, "capacity": capacity}
            said = measure(model, corpus, **knobs)
            if capacity == own:
                ran[rule] = said.executed
            result["rules"].append(
                {
                    "selection": rule,
                    "capacity": capacity,
                    "realised": realised(model.config, said.mean_depth),
                    "loss": round(said.loss, 4),
                    "macs_per_token": round(said.macs / int((said.depths > 0).sum())),
                    "kv_bytes_per_token": round(
                        int(said.row_kv_bytes.sum()) / int((said.depths > 0).sum()), 1
                    ),
                }
            )
        result["routers"] = agreement(model, corpus, ran["threshold"], ran["topk"])
    elif getattr(model.config, "policy", "fixed") != "fixed":
        depths, full = said.depths[said.depths > 0], model.config.num_loops
        history = json.loads((folder / "training.json").read_text())["history"]
        result |= {
            "mean_depth": figures["mean_depth"],
            "full_depth": full,
            "shares": (np.bincount(depths, minlength=full + 1)[1:] / len(depths)).round(4).tolist(),
            "depth_curve": depth_curve(history, model.stack.policy.skips_in_training),
            **collapse(depths, model.config.min_steps, full, model.config.policy),
        }
        if thresholds:
            knob = sweep_language(folder, thresholds, names, repeats=1)
            result |= {name: knob[name] for name in ("fixed", "rows", "best", "best_fixed", "target")}
    if loaded.recipe.data.algorithmic is not None:
        result["quality"] = measure_problems(folder, sets or (), thresholds)
    return result


def depth_curve(history: list[dict[str, Any]], stops: bool) -> list[list[float]]:
    """[step, mean depth] of each log of a training: the expected depth where it is logged, else that executed, if
    tokens stop in training (`stops`); where they do not, it says what the schedule or a draw ran, not what was learnt.
    """
    key = "depth/expected" if any("depth/expected" in one for one in history) else "depth/mean"
    if key == "depth/mean" and not stops:
        return []
    return [[one["step"], round(one[key], 3)] for one in history if key in one]


def shift_in(folder: Path) -> dict[str, Any] | None:
    """Of a trained folder, whether surprise by novelty gave way to surprise by prediction, over the mean of its layers
    (shift.py); None where no surprise was logged.
    """
    found = shift(json.loads((folder / "training.json").read_text())["history"])
    return None if found is None else found["overall"]


def agreement(model, corpus, causal: np.ndarray, top: np.ndarray | None = None) -> dict[str, dict[str, Any]]:
    """Of each routed layer, how its causal choice [N, L] compares with Top-K's (`top` [N, L]) on the same text.

    alike: share of the tokens decided alike; majority: what the commoner answer alone would reach; f1: of being
    taken. router, router_majority, router_f1: of the trained router, cut at 0.5, against its teacher (STT, MoD), and
    beats: whether its accuracy is above the majority rate by more than two standard errors.
    """
    from .language import measure

    top = measure(model, corpus, selection="topk").executed if top is None else top
    scores, layers = router_scores(model, corpus), {}
    for layer in model.config.routed_layers:
        ours, theirs, own = causal[:, layer], top[:, layer], scores.get(str(layer), {})
        rate = theirs.mean()
        row: dict[str, Any] = {
            "alike": round(float((ours == theirs).mean()), 4),
            "majority": round(float(max(rate, 1 - rate)), 4),
            "f1": round(float(2 * (ours & theirs).sum() / max(1, ours.sum() + theirs.sum())), 4),
        }
        # two standard errors of a share of so many tokens
        margin = 1 / len(ours) ** 0.5
        if "accuracy" in own:
            row |= {"router": own["accuracy"], "router_majority": own["majority"], "router_f1": own["f1"],
                    "beats": own["accuracy"] > own["majority"] + margin}  # fmt: skip
        layers[str(layer)] = row
    return layers


def router_scores(model, corpus, batch: int = 16) -> dict[str, dict[str, float]]:
    """Accuracy, majority rate and F1 of each layer's causal router against the teacher's Top-K, on held-out text."""
    import torch

    sums: dict[str, list[float]] = {}
    inputs = {name: value for name, value in corpus.inputs.items() if name != "labels"}
    rows = len(corpus.labels)
    for start in range(0, rows, batch):
        some = {name: value[start : start + batch].to(model.device) for name, value in inputs.items()}
        with torch.inference_mode():
            signs = model(**some, use_cache=False, selection="topk", output_routing=True).signs
        for name, value in signs.items():
            sums.setdefault(name, []).append(float(value))
    layers: dict[str, dict[str, float]] = {}
    for name, values in sums.items():
        layer, sign = name.split(".")
        layers.setdefault(layer, {})[sign] = round(float(np.mean(values)), 4)
    return layers


def table_of(plan: Comparison, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a row: means and spreads over seeds, the loss also as a difference from `against`, seed by seed."""
    base = {one["seed"]: one["loss"] for one in results if one["row"] == plan.against}
    lines = []
    for name in dict.fromkeys(one["row"] for one in results):
        some = [one for one in results if one["row"] == name]
        loss = np.array([one["loss"] for one in some])
        gaps = np.array([one["loss"] - base[one["seed"]] for one in some if one["seed"] in base])
        line = {
            "row": name,
            "seeds": len(some),
            "parameters": some[0]["parameters"],
            "loss": round(float(loss.mean()), 4),
            "loss_spread": _spread(loss),
            "minus_against": round(float(gaps.mean()), 4) if len(gaps) else None,
            "minus_against_spread": _spread(gaps),
            "accuracy": round(float(np.mean([one["accuracy"] for one in some])), 2)
            if "accuracy" in some[0]
            else None,
            "macs_per_token": round(float(np.mean([one["macs_per_token"] for one in some]))),
            "train_cpu_seconds": round(float(np.mean([one["train_cpu_seconds"] for one in some])), 1),
        }
        rules = [{(one["selection"], one["capacity"]): one for one in cell.get("rules", [])} for cell in some]
        saved = [one["best"]["saved_over_fixed"] for one in some if one.get("best")]
        if saved:
            # nats against a fixed depth of the same MACs, threshold chosen on other documents
            line["saved_over_fixed"] = round(float(np.mean(saved)), 4)
            line["saved_over_fixed_spread"] = _spread(np.array(saved))
        if rules[0]:
            own = next(key for key in rules[0] if key[0] == "threshold")
            top = ("topk", own[1])
            line["realised"] = round(float(np.mean([one[own]["realised"] for one in rules])), 4)
            over = [100 * (one[own]["loss"] / one[top]["loss"] - 1) for one in rules]
            line["over_topk_percent"] = round(float(np.mean(over)), 3)
            kv = [one[own]["kv_bytes_per_token"] / one["dense", 1.0]["kv_bytes_per_token"] for one in rules]
            line["kv_share"] = round(float(np.mean(kv)), 4)
        lines.append(line)
    return lines


def picture(results: list[dict[str, Any]], path: Path) -> None:
    """Depth during training, one line a model that has one (`depth_curve`), and the depths on held-out text, one row a
    model.
    """
    from matplotlib.figure import Figure

    some = [one for one in results if "depth_curve" in one]
    names = [*dict.fromkeys(one["row"] for one in some)]
    figure = Figure(figsize=(9, 0.4 * len(names) + 2.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for one in some:
        if not one["depth_curve"]:
            continue
        steps, depths = zip(*one["depth_curve"], strict=True)
        left.plot(steps, depths, color=f"C{names.index(one['row'])}", label=one["row"])
    left.set_xlabel("step")
    left.set_ylabel("expected depth in training, loops")
    left.set_ylim(bottom=0)
    for number, name in enumerate(names):
        shares = np.mean([one["shares"] for one in some if one["row"] == name], 0)
        ends = np.cumsum(shares)
        for depth, (share, end) in enumerate(zip(shares, ends, strict=True)):
            shade = 0.9 - 0.75 * depth / max(1, len(shares) - 1)
            right.barh(number, share, left=end - share, color=str(shade))
            if share > 0.08:
                ink = "0" if shade > 0.5 else "1"
                right.text(
                    end - share / 2, number, str(depth + 1), color=ink, ha="center", va="center", fontsize=8
                )
    right.set_yticks(range(len(names)), names)
    for label, number in zip(right.get_yticklabels(), range(len(names)), strict=True):
        label.set_color(f"C{number}")
    right.invert_yaxis()
    right.set_xlabel("share of held-out tokens, by loops run")
    figure.savefig(path, metadata={"Date": None})


def _spread(values: np.ndarray) -> float | None:
    return round(float(values.std(ddof=1)), 4) if len(values) > 1 else None


def run_comparison(
    path: str | Path,
    output: str | Path,
    only: str | None = None,
    progress=None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Trains and measures every cell into `output`, one folder each; writes table.json (and of looped models
    picture.svg) there.

    only: names of cells to run now, with * and ? (another process may run others); the table has all that are done.
    overrides: flags such as `--data.parallel.folder=FOLDER`, which change keys of every row's recipe.
    """
    from .compare_logic import logic_table, measure_logic, readings_in
    from .compare_pairs import measure_pairs, pairs_table

    plan, output = load_plan(path, Comparison), Path(output)
    cells = cells_of(plan, overrides)
    if of_pairs(cells[0].recipe):
        settings = {name: getattr(plan, name) for name in ("sets", "beams", "length_penalty", "limit")}
        results = run_cells(cells, output, only, measure_pairs, settings, progress)
        folders = {(cell.labels["row"], cell.labels["seed"]): output / cell.name for cell in cells}
        rows = pairs_table(plan.against, results, folders)
    elif of_logic(cells[0].recipe):
        results = run_cells(cells, output, only, measure_logic, {"generated": plan.generated}, progress)
        folders = {tuple(cell.labels.values()): output / cell.name for cell in cells}
        for one in results:
            one["readings"] = readings_in(folders[one["row"], one["protocol"], one["seed"]])
        rows = logic_table(plan.against, results)
    else:
        settings = {"capacities": plan.capacities, "thresholds": plan.thresholds}
        if cells[0].recipe.data.algorithmic is not None:
            settings["sets"] = plan.sets
        results = run_cells(cells, output, only, measure_cell, settings, progress)
        folders = {(cell.labels["row"], cell.labels["seed"]): output / cell.name for cell in cells}
        for one in results:
            if "rules" in one:
                one["shift"] = shift_in(folders[one["row"], one["seed"]])
        rows = table_of(plan, results)
        if results and "quality" in results[0]:
            lines = problems_lines(results)
            rows = [{**row, "problems": lines[row["row"]]} for row in rows]
    figures = {
        "against": plan.against,
        "cells": len(cells),
        "done": len(results),
        "rows": rows,
        "results": results,
    }
    (output / "table.json").write_text(json.dumps(figures, indent=1) + "\n")
    if any("depth_curve" in one for one in results):
        picture(results, output / "picture.svg")
    return figures
