"""Equal-FLOPs evidence: a looped model beside every dense model it could be taken for.

    (1) L(N_once + r^phi N_rec) = E + A (N_once + r^phi N_rec)^-alpha        at the same tokens (2604.21106)

N_rec are the parameters that r loops share, N_once the others (embeddings apart); phi = 0: a repetition is worth
nothing, phi = 1: as much as fresh parameters. Fitted over widths and loops by least squares, the interval from
resampling the runs of each (width, r) point.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .intervals import student
from .matrix import (
    Cell,
    language_recipe,
    ledger_macs,
    load_plan,
    measure_looped,
    run_cells,
    varied,
    with_preset,
)


@dataclass
class Iso:
    """What is compared.

    base: the recipe of the looped model (num_loops=r, num_core_layers=C). seeds: of the comparison; member_seeds:
    those of a member, by its name, instead. The others are made from the base, on the same tokens: the looped model at
    fixed depth, without halting; dense with the same parameters (one loop); the dense unrolled shape (r x C layers: the
    arithmetic of full depth at inference). And dense with the same training arithmetic, by the ledger, both ways: the
    same parameters on more tokens, as many layers as that arithmetic allows on the same tokens.
    widths, loops, width_seeds: the grid of the exponent: hidden sizes (heads and feed-forward grow with them) and
    r, unrolled depth kept; made from `grid_base`, or from `base` without one.
    """

    base: str
    grid_base: str | None = None
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    member_seeds: dict[str, list[int]] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)
    loops: list[int] = field(default_factory=lambda: [1, 2, 4])
    width_seeds: dict[int, list[int]] = field(default_factory=dict)
    thresholds: list[float] = field(default_factory=lambda: [0.7, 0.5, 0.4, 0.3, 0.2, 0.1])


PLAIN = {"policy": "fixed", "objective": "policy", "act_weight": 0.0}


def cells_of(plan: Iso) -> list[Cell]:
    """The comparison's models and the grid's."""
    from .presets import preset

    base = with_preset(language_recipe(plan.base), plan.base)
    looped = preset(base.preset, **base.config)
    r, layers, steps = looped.num_loops, looped.num_core_layers, base.training["max_steps"]
    dense = {**PLAIN, "num_loops": 1, "input_injection": "none"}
    shapes = {"same parameters": dense, "unrolled": {**dense, "num_core_layers": r * layers}}
    spent = training_macs(base)
    once, each = ledger_macs(base, {**base.config, **dense})
    longer = round(steps * spent / (once + each))
    larger = max(1, round((spent - once) / (each / layers)))
    cells = []
    for seed in plan.seeds:
        members = {"looped": varied(base, {}, seed), "looped, fixed depth": varied(base, PLAIN, seed)}
        for name, shape in shapes.items():
            members[f"dense, {name}"] = varied(base, shape, seed)
        members["dense, same training MACs, more tokens"] = varied(base, dense, seed, max_steps=longer)
        members["dense, same training MACs, more layers"] = varied(
            base, {**dense, "num_core_layers": larger}, seed
        )
        unknown = sorted(set(plan.member_seeds) - set(members))
        if unknown:
            raise ValueError(f"member_seeds names {unknown[0]!r}; the members are {', '.join(members)}.")
        for name, recipe in members.items():
            if seed not in plan.member_seeds.get(name, plan.seeds):
                continue
            folder = name.replace(", ", "-").replace(" ", "-")
            cells.append(Cell(f"{folder}-{seed}", {"member": name, "seed": seed}, recipe))
    if plan.grid_base is not None:
        base = with_preset(language_recipe(plan.grid_base), plan.grid_base)
        looped = preset(base.preset, **base.config)
        r, layers = looped.num_loops, looped.num_core_layers
    for width in plan.widths:
        for loops in plan.loops:
            unrolled = r * layers
            if unrolled % loops:
                raise ValueError(
                    f"{unrolled} layers do not divide into {loops} loops; change num_core_layers or loops."
                )
            shape = {
                **PLAIN, "hidden_size": width, "num_attention_heads": width // looped.head_dim,
                "num_key_value_heads": width // looped.head_dim, "num_loops": loops,
                "num_core_layers": unrolled // loops,
                "intermediate_size": round(width * looped.intermediate_size / looped.hidden_size / 8) * 8,
            }  # fmt: skip
            for seed in plan.width_seeds.get(width, [0]):
                labels = {"member": "grid", "width": width, "r": loops, "seed": seed}
                cells.append(Cell(f"grid-{width}-{loops}-{seed}", labels, varied(base, shape, seed)))
    return cells


def training_macs(base) -> float:
    """A third of the MACs that a token costs the looped model in training, by the ledger: a dense model's forward pass
    of the same cost. Forward and backward of the mean of the sampled depths; while an exit head learns, forward only,
    the other loops and a reading after each.
    """
    from .presets import preset
    from .tasks import vocabulary

    config = preset(base.preset, **{"vocab_size": vocabulary(base), **base.config})
    once, each = ledger_macs(base, {**base.config, **PLAIN})
    loops = config.num_loops
    readings = (loops - 1) * config.hidden_size * config.vocab_size
    if config.num_coda_layers and (config.objective == "all" or config.policy == "exit_head"):
        raise ValueError(
            "The equal-MACs members are not worked out for num_coda_layers above 0 with several readings."
        )
    plain = (1 + loops) / 2 if config.objective == "sampled" else loops
    macs = once + plain * each + (readings if config.objective == "all" else 0)
    if config.policy == "exit_head":
        share = base.schedule.halting_from
        # forward 1, backward 2: what only the head's labels need has no backward pass
        rest = (loops - plain) * each + readings if config.objective != "all" else 0
        macs += (1 - share) * rest / 3
    return macs


def block_parameters(recipe) -> tuple[int, int]:
    """Parameters outside the core and of the core, embeddings and halting nets apart."""
    import torch

    from .presets import build, preset

    with torch.device("meta"):
        stack = build(preset(recipe.preset, **recipe.config), "causal").stack
    count = {name: sum(p.numel() for p in part.parameters()) for name, part in stack.named_children()}
    return count["prelude"] + count["coda"], count["core"]


def fit_exponent(points: list[tuple[int, int, int, float]], draws: int = 200) -> dict[str, Any]:
    """Eq. 1 from points (N_once, N_rec, r, loss): phi with its 95% bootstrap interval, alpha, E, A, residual.

    For each phi of a grid and alpha of another, E and A follow linearly; the best pair wins. At least two widths of
    r = 1 and two values of r are needed.
    """
    data = np.array(points, float)
    if len(np.unique(data[:, 2])) < 2 or len(np.unique(data[data[:, 2] == 1][:, 1])) < 2:
        raise ValueError("The exponent needs r = 1 at two widths at least, and another r.")

    def best(rows: np.ndarray) -> tuple[float, float, float, float, float]:
        found = (np.inf, 0.0, 0.0, 0.0, 0.0)
        for alpha in np.linspace(0.05, 1.0, 20):
            for phi in np.linspace(-0.25, 1.25, 76):
                size = (rows[:, 0] + rows[:, 2] ** phi * rows[:, 1]) ** -alpha
                scaled = size / size.mean()
                design = np.stack([np.ones_like(scaled), scaled], 1)
                answer, *_ = np.linalg.lstsq(design, rows[:, 3], rcond=None)
                wrong = float(((design @ answer - rows[:, 3]) ** 2).sum())
                # more parameters must not hurt
                if wrong < found[0] and answer[1] > 0:
                    found = (wrong, phi, alpha, answer[0], answer[1] / size.mean())
        return found

    wrong, phi, alpha, floor, scale = best(data)
    random, drawn = np.random.default_rng(0), []
    keys = [tuple(row[:3]) for row in data]
    groups = [np.flatnonzero([key == one for key in keys]) for one in dict.fromkeys(keys)]
    residual = (wrong / max(1, len(data) - 4)) ** 0.5
    for _ in range(draws):
        rows = data[np.concatenate([random.choice(group, len(group)) for group in groups])]
        # a point with one run has the noise of the fit
        alone = np.concatenate([np.full(len(group), len(group) == 1) for group in groups])
        rows[alone, 3] += random.normal(0, residual, alone.sum())
        drawn.append(best(rows)[1])
    return {
        "phi": round(float(phi), 3),
        "interval": np.percentile(drawn, [2.5, 97.5]).round(3).tolist(),
        "alpha": round(float(alpha), 3),
        "floor": round(float(floor), 4),
        "scale": float(scale),
        "residual": round(residual, 5),
        "points": len(data),
    }


def readings(one: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines that a model's results give: a looped one at full depth, at its best fixed depth, and as it stops."""
    if one["loops"] == 1:
        return [one]
    full, best = one["fixed"][-1], one["best_fixed"]
    lines = [{**one, **full, "member": f"{one['member']}, full depth"}]
    if best is not None:
        # the depth was chosen on half of the documents; here is its loss on all, as the others have it
        lines.append({**one, **one["fixed"][best["max_steps"] - 1], "member": f"{one['member']}, best depth"})
    if one.get("best"):
        # as measured: at the threshold of its config
        lines.append({**one, "member": f"{one['member']}, adaptive"})
    return lines


def members_table(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a model and way of reading it: loss over seeds; its difference from the looped model at the best of its
    readings that do not adapt, paired by seed, with an interval; MACs.
    """
    lines = [line for one in results if one["member"] != "grid" for line in readings(one)]
    yardstick: dict[int, float] = {}
    for line in lines:
        if line["member"] == "looped, best depth":
            yardstick[line["seed"]] = line["loss"]
    rows = []
    for name in dict.fromkeys(line["member"] for line in lines):
        some = [line for line in lines if line["member"] == name]
        loss = np.array([line["loss"] for line in some])
        gaps = np.array(
            [line["loss"] - yardstick[line["seed"]] for line in some if line["seed"] in yardstick]
        )
        rows.append(
            {
                "member": name, "seeds": len(some), "parameters": some[0]["parameters"],
                "loss": round(float(loss.mean()), 4),
                "loss_spread": round(float(loss.std(ddof=1)), 4) if len(loss) > 1 else None,
                "minus_looped": round(float(gaps.mean()), 4) if len(gaps) else None,
                "minus_looped_interval": student(gaps)["interval"] if len(gaps) else None,
                "macs_per_token": round(float(np.mean([line["macs_per_token"] for line in some]))),
                "train_cpu_seconds": round(float(np.mean([line["train_cpu_seconds"] for line in some])), 1),
            }
        )  # fmt: skip
    return rows


def run_isoflops(
    path: str | Path, output: str | Path, only: str | None = None, progress=None
) -> dict[str, Any]:
    """Trains and measures every model into `output`, one folder each; writes table.json there.

    only: names of models to run now, with * and ?; the tables have all that are done.
    """
    plan, output = load_plan(path, Iso), Path(output)
    cells = cells_of(plan)
    results = run_cells(cells, output, only, measure_looped, {"thresholds": plan.thresholds}, progress)
    by_name = {cell.name: cell for cell in cells}
    figures: dict[str, Any] = {"cells": len(cells), "done": len(results), "members": members_table(results)}
    points = []
    for one in results:
        if one["member"] == "grid":
            cell = by_name[f"grid-{one['width']}-{one['r']}-{one['seed']}"]
            points.append((*block_parameters(cell.recipe), one["r"], one["loss"]))
    figures["exponent"] = None
    loops = {r for _, _, r, _ in points}
    if len(loops) > 1 and len({rec for _, rec, r, _ in points if r == 1}) > 1 and len(points) > 4:
        figures["exponent"] = fit_exponent(points)
    figures["grid"] = [dict(zip(("once", "shared", "r", "loss"), point, strict=True)) for point in points]
    figures["results"] = results
    (output / "table.json").write_text(json.dumps(figures, indent=1) + "\n")
    return figures
