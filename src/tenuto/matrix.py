"""Exchange of parts: bodies x policies x seeds, trained and measured alike; resumes after a kill.

Every cell is a folder: its training run (resumable by itself) and, once measured, `cell.json`. A second call trains
and measures only what is missing, then makes the table and the picture from all cells.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .recipe import Recipe, keys_of, load_recipe


@dataclass
class Matrix:
    """What is exchanged for what.

    base: the recipe of every cell. bodies, policies: name -> fields of the config. seeds: of the trainings.
    budgets: "loops" gives every body the recipe's num_loops; "macs" as many as come closest to the first body's MACs
    per token. thresholds: at which the policies are read.
    """

    base: str
    bodies: dict[str, dict[str, Any]]
    policies: dict[str, dict[str, Any]]
    seeds: list[int] = field(default_factory=lambda: [0])
    budgets: list[Literal["loops", "macs"]] = field(default_factory=lambda: ["loops"])
    thresholds: list[float] = field(default_factory=lambda: [0.9, 0.7, 0.5, 0.3, 0.1])


@dataclass
class Cell:
    """One training: the name of its folder, what distinguishes it in the tables, and the recipe."""

    name: str
    labels: dict[str, Any]
    recipe: Recipe


def load_plan(path: str | Path, kind: type):
    """Reads a YAML file into a dataclass; FileNotFoundError or ValueError with one sentence if it or a key is wrong."""
    from jsonargparse import ArgumentError, ArgumentParser

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--plan", action="config")
    parser.add_class_arguments(kind)
    try:
        values = parser.instantiate(parser.parse_args([f"--plan={path}"])).as_dict()
    except ArgumentError as error:
        if "base" not in keys_of(path):
            raise ValueError(
                f"{path} names no `base`: it is not a plan of several models. `tenuto train` takes a recipe."
            ) from error
        raise ValueError(f"{path}: {error}") from error
    values.pop("plan")
    return kind(**values)


def language_recipe(path: str) -> Recipe:
    """The recipe that all cells share; it must be a language model's."""
    base = load_recipe(path)
    if base.head != "causal":
        raise ValueError(f'{path} has head {base.head!r}; cells are language models (head "causal").')
    return base


def with_preset(base: Recipe, path: str) -> Recipe:
    """The recipe, which must name a preset: shapes are varied from one."""
    if base.preset is None:
        raise ValueError(
            f"{path} starts from a checkpoint; the shapes of the cells need a recipe with a preset."
        )
    return base


def varied(base: Recipe, config: dict[str, Any], seed: int, **training) -> Recipe:
    """A copy of a recipe with config fields, seed and training arguments changed, checked."""
    from .presets import config_of

    recipe = copy.deepcopy(base)
    recipe.config = {**base.config, **config}
    recipe.training = {**base.training, "seed": seed, **training}
    config_of(recipe)
    return recipe


def ledger_macs(base: Recipe, config: dict[str, Any]) -> tuple[float, float]:
    """MACs of one token of a full row outside the core, and of one loop of it: what the ledger books, scores too."""
    import torch

    from .presets import build, preset
    from .tasks import vocabulary

    length = base.data.text.length if base.data.text else 32
    macs = []
    for loops in (2, 3):
        fields = {"vocab_size": vocabulary(base), **config, "num_loops": loops, "max_loops": None}
        with torch.inference_mode():
            model = build(preset(base.preset, **fields), "causal").eval()
            macs.append(
                model(torch.ones(1, length, dtype=torch.long), use_cache=False).compute.total / length
            )
    return 3 * macs[0] - 2 * macs[1], macs[1] - macs[0]


def cells_of(matrix: Matrix) -> list[Cell]:
    """Every cell with its recipe, checked before anything is trained."""
    from .presets import preset

    base = with_preset(language_recipe(matrix.base), matrix.base)
    plain = {"policy": "fixed", "act_weight": 0.0}
    first = {**base.config, **next(iter(matrix.bodies.values())), **plain}
    loops = preset(base.preset, **first).num_loops
    target = 0
    if "macs" in matrix.budgets:
        once, each = ledger_macs(base, first)
        target = once + loops * each
    cells, fitting = [], {}
    for (body, part), (policy, rule), budget, seed in product(
        matrix.bodies.items(), matrix.policies.items(), matrix.budgets, matrix.seeds
    ):
        config = {**part, **rule}
        if budget == "macs":
            if body == next(iter(matrix.bodies)):
                continue  # it is its own measure: the same cell as with equal loops
            if body not in fitting:
                once, each = ledger_macs(base, {**base.config, **part, **plain})
                fitting[body] = max(1, round((target - once) / each))
            if fitting[body] == preset(base.preset, **{**base.config, **part, **plain}).num_loops:
                continue  # the same cell as with equal loops
            config["num_loops"] = fitting[body]
        labels = {"body": body, "policy": policy, "budget": budget, "seed": seed}
        name = "-".join(map(str, labels.values()))
        cells.append(Cell(name, labels, varied(base, config, seed)))
    return cells


def run_cell(
    cell: Cell, folder: Path, measure_cell: Callable[..., dict], settings: dict[str, Any], progress=None
) -> dict[str, Any]:
    """Trains (or goes on training) and measures one cell; what is done already, at the same settings, is read."""
    from .train import same_recipe, train

    file = folder / "cell.json"
    if (folder / "recipe.yaml").is_file():
        same_recipe(cell.recipe, folder)
    if file.is_file():
        result = json.loads(file.read_text())
        if all(result.get(name) == value for name, value in settings.items()):
            return result
    if (folder / "training.json").is_file():
        trained = json.loads((folder / "training.json").read_text())
    else:
        trained = train(cell.recipe, folder, resume=folder.is_dir(), progress=progress)
    length = cell.recipe.data.text.length if cell.recipe.data.text else None
    steps, cpu = cell.recipe.training["max_steps"], trained["seconds"]["cpu"]
    batch = cell.recipe.training.get("per_device_train_batch_size", 8)
    result = {
        **cell.labels,
        "parameters": trained["parameters"],
        "train_tokens_per_cpu_second": round(steps * batch * length / cpu) if length and cpu else None,
        "train_cpu_seconds": cpu,
        **settings,
        **measure_cell(folder, **settings),
    }
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.replace(file)
    return result


def measure_looped(folder: Path, thresholds: list[float]) -> dict[str, Any]:
    """Held-out figures of a looped model: by its own rule, at every fixed depth, at the thresholds."""
    from .collapse import collapse
    from .evaluate import load
    from .language import corpus_of, measure, summary
    from .language_sweep import sweep_language

    loaded = load(folder)
    corpus, config = corpus_of(loaded), loaded.model.config
    said = measure(loaded.model, corpus)
    figures = summary(corpus, said)
    result = {
        "loops": config.num_loops, "loss": figures["loss"],
        "mean_depth": figures["mean_depth"], "macs_per_token": figures["macs_per_token"],
        "tokens_per_cpu_second": round(figures["tokens"] / said.cpu_seconds),
    }  # fmt: skip
    if config.policy != "fixed":
        result |= collapse(said.depths[said.depths > 0], config.min_steps, config.num_loops, config.policy)
        knob = sweep_language(folder, thresholds, repeats=1)
        result |= {name: knob[name] for name in ("fixed", "rows", "best", "best_fixed", "target")}
    else:
        result |= fixed_depths(loaded.model, corpus)
    if config.ffn_experts > 1 or config.attention_experts > 1:
        result["expert_loop_nats"] = expert_loops(loaded.model, corpus)
    return result


def fixed_depths(model, corpus) -> dict[str, Any]:
    """`fixed`: loss and MACs of every depth 1..L, all tokens alike. `best_fixed`: the best one on one half of the
    documents, with its loss on the other half.
    """
    from .language import measure
    from .language_sweep import halves

    passes = [measure(model, corpus, max_steps=depth) for depth in range(1, model.config.num_loops + 1)]
    rows = [
        {
            "max_steps": depth,
            "loss": round(said.loss, 4),
            "macs_per_token": round(said.macs / (said.depths > 0).sum()),
        }
        for depth, said in enumerate(passes, 1)
    ]
    fit, test = halves(corpus)
    best = None
    if len(fit) and len(test):
        place = min(range(len(passes)), key=lambda place: passes[place].on(fit).loss)
        best = {**rows[place], "loss": round(passes[place].on(test).loss, 4)}
    return {"fixed": rows, "best_fixed": best}


def expert_loops(model, corpus) -> dict[str, float]:
    """Mutual information of expert and loop index, in nats, for the routers of the core by part."""
    import torch

    from .expert_usage import expert_loop_information

    rows = {name: value[:16].to(model.device) for name, value in corpus.inputs.items() if name != "labels"}
    with torch.inference_mode():
        routing = model(**rows, use_cache=False, output_routing=True).routing
    experts = {"attention": model.config.attention_experts, "feed_forward": model.config.ffn_experts}
    return {
        part: round(float(expert_loop_information(routing, count, part)), 4)
        for part, count in experts.items()
        if count > 1
    }


def table_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each body, policy and budget: means over seeds, and the spread of the loss.

    saved_over_fixed: nats below what fixed depths reach with the row's MACs (`frontier`), all models of the same body
    and seed at each of their depths: a policy that mixes depths is not itself trained at any one of them.
    """
    from .language_sweep import frontier

    fixed: dict[tuple, list[tuple[float, float]]] = {}
    for one in results:
        points = [(row["macs_per_token"], row["loss"]) for row in one["fixed"]]
        fixed.setdefault((one["body"], one["seed"]), []).extend(points)
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for one in results:
        groups.setdefault((one["body"], one["policy"], one["budget"]), []).append(one)
    rows = []
    for (body, policy, budget), some in groups.items():
        loss = np.array([one["loss"] for one in some])
        reached = [
            float(np.interp(one["macs_per_token"], *frontier(fixed[one["body"], one["seed"]])))
            for one in some
        ]
        saved = np.array(reached) - loss if policy != "fixed" else []
        rows.append(
            {
                "body": body, "policy": policy, "budget": budget, "seeds": len(some), "loops": some[0]["loops"],
                "parameters": some[0]["parameters"], "loss": round(float(loss.mean()), 4),
                "loss_spread": round(float(loss.std(ddof=1)), 4) if len(loss) > 1 else None,
                "mean_depth": round(float(np.mean([one["mean_depth"] for one in some])), 3),
                "macs_per_token": round(float(np.mean([one["macs_per_token"] for one in some]))),
                "tokens_per_cpu_second": round(float(np.mean([one["tokens_per_cpu_second"] for one in some]))),
                "saved_over_fixed": round(float(np.mean(saved)), 4) if len(saved) else None,
                "collapsed": sum(one.get("collapsed", False) for one in some),
            }
        )  # fmt: skip
    return rows


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss against MACs per token, one colour a body, one mark a policy; collapsed cells are hollow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    bodies, policies = ([*dict.fromkeys(row[key] for row in rows)] for key in ("body", "policy"))
    marks = "osD^v<>PX*"
    for row in rows:
        colour = f"C{bodies.index(row['body'])}"
        axes.plot(
            row["macs_per_token"] / 1e6, row["loss"], marks[policies.index(row["policy"]) % len(marks)],
            color=colour, markerfacecolor="none" if row["collapsed"] else colour,
        )  # fmt: skip
    for number, body in enumerate(bodies):
        axes.plot([], [], "s", color=f"C{number}", label=body)
    for number, policy in enumerate(policies):
        axes.plot([], [], marks[number % len(marks)], color="0.4", label=policy)
    axes.set_xlabel("million MACs per token")
    axes.set_ylabel("held-out loss, nats per token")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, metadata={"Date": None})


def run_matrix(
    path: str | Path, output: str | Path, only: str | None = None, progress=None
) -> dict[str, Any]:
    """Trains and measures every cell into `output`, one folder each; writes table.json and picture.svg there.

    only: names of cells to run now, with * and ? (another process may run others); the table has all that are done.
    """
    matrix, output = load_plan(path, Matrix), Path(output)
    cells = cells_of(matrix)
    results = run_cells(cells, output, only, measure_looped, {"thresholds": matrix.thresholds}, progress)
    rows = table_of(results)
    figures = {"cells": len(cells), "done": len(results), "rows": rows, "results": results}
    (output / "table.json").write_text(json.dumps(figures, indent=1) + "\n")
    picture(rows, output / "picture.svg")
    return figures


def run_cells(
    cells: list[Cell], output: Path, only: str | None, measure_cell: Callable[..., dict],
    settings: dict[str, Any], progress=None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Runs the cells whose name fits `only` (all when None); returns the results of all that are done, those measured
    at other settings left out.

    measure_cell: (folder, **settings) -> figures of a trained one; what has been measured so is not measured again.
    """
    names = [cell.name for cell in cells]
    if only is not None and not any(fnmatch(name, only) for name in names):
        raise ValueError(f"No cell is called {only!r}; they are {', '.join(names)}.")
    for cell in cells:
        if only is None or fnmatch(cell.name, only):
            with nullcontext() if progress is None else progress() as bar:
                run_cell(cell, output / cell.name, measure_cell, settings, bar)
    files = [output / cell.name / "cell.json" for cell in cells]
    results = [json.loads(file.read_text()) for file in files if file.is_file()]
    return [one for one in results if all(one.get(name) == value for name, value in settings.items())]
