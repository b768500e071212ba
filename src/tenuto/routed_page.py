"""The report of a routed language model: whether surprise shifts in training, the capacity knob beside the dense model,
how well a causal rule foretells Top-K, which tokens the layers take, and text coloured by the layers it ran.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from .calibrate import ASKED, WHOLE, shares_of
from .compare import agreement
from .evaluate import load
from .figures import ACCENT, INK, LINE, MUTED, SECOND, _axes, draw
from .language import Corpus, Measured, corpus_of, measure
from .language_page import PROMPTS
from .language_sweep import sweep_capacity
from .page import _css, _figure, _grid, _p, _section, _table, _training
from .report import made_by
from .routed_depths import PARTS, executed_by
from .shift import series, shift
from .written import pieces, write

KNOWN = {
    "tenuto_mod": "Mixture-of-Depths",
    "tenuto_sdt": "Subjective Depth",
    "tenuto_stt": "Subjective Timescale",
}
SURPRISE = {"s_cu": "novelty, S_CU", "s_ce": "prediction, S_CE"}
GATE = {"gate": "gate g, mean over the tokens"}
CHOICE = {"accuracy": "router's accuracy", "f1": "F1", "majority": "majority rate", "capacity": "share taken"}
# colour and dashes of the 1st, 2nd, ... line of a picture, and the CSS that says the same
STYLES = (
    (ACCENT, "-", "solid var(--accent)"),
    (SECOND, "-", "solid var(--second)"),
    (MUTED, (0, (4, 2)), "dashed var(--muted)"),
    (INK, (0, (1, 1.5)), "dotted var(--ink)"),
)
READ = 160  # tokens of a held-out text shown
SHEET = (
    ".multiples{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,14rem),1fr));gap:1rem 1.6rem;"
    "margin:.6rem 0 1rem}.keys{display:flex;flex-wrap:wrap;gap:.3rem 1.4rem;font-size:.86rem;color:var(--muted)}"
    ".keys i{display:inline-block;width:1.5rem;margin:0 .45rem .22rem 0}"
)


# measurements


def measure_routed(
    checkpoint: str | Path, limit: int | None = None, prompts: Sequence[str] = PROMPTS
) -> dict[str, Any]:
    """Everything that the report shows, as plain numbers."""
    loaded = load(checkpoint)
    model, config = loaded.model, loaded.model.config
    text = loaded.recipe.data.text is not None
    corpus = corpus_of(loaded, limit=limit)
    said = measure(model, corpus, "depths")
    dense, gated = (measure(model, corpus, name, **knobs) for name, knobs in WHOLE.items())
    trained = Path(checkpoint) / "training.json"
    history = json.loads(trained.read_text())["history"] if trained.is_file() else []
    layers = shares_of(model, said.executed)
    # Top-K cannot write
    rule = {"selection": "threshold"} if config.selection == "topk" else {}
    written = [write(model, loaded.tokenizer, one, 60, **rule) for one in prompts] if text else []
    return {
        "name": f"{loaded.recipe.preset or loaded.recipe.start}, {config.model_type.removeprefix('tenuto_')}",
        "kind": KNOWN[config.model_type],
        "parameters": sum(p.numel() for p in model.parameters()),
        "num_layers": config.num_hidden_layers,
        "routed_layers": config.routed_layers,
        "capacity": config.capacity,
        "selection": config.selection,
        "command": made_by(checkpoint)["command"],
        "history": history,
        "shift": shift(history),
        "own": {
            "tokens": int((said.depths > 0).sum()),
            "loss": round(said.loss, 4),
            "whole_loss": round(min(dense.loss, gated.loss), 4),
            "layers_per_token": round(said.mean_depth, 3),
            "capacity_realised": round(float(np.mean(list(layers.values()))), 4),
            "layers": layers,
            "macs_share": round(said.macs / dense.macs, 4),
            "kv_share": round(int(said.row_kv_bytes.sum()) / int(dense.row_kv_bytes.sum()), 4),
        },
        "knob": sweep_capacity(checkpoint, ASKED, repeats=2, limit=limit),
        "routers": agreement(model, corpus, said.executed),
        "executed": executed_by(loaded, corpus, said, dense.losses),
        "read": _read(loaded, corpus, said) if text else [],
        "written": [
            {**asdict(one), "setting": one.setting, "mean_depth": round(one.mean_depth, 3)} for one in written
        ],
    }


def _read(loaded, corpus: Corpus, said: Measured) -> list[dict[str, Any]]:
    """The beginning of a held-out row of each topic, at most three."""
    texts = []
    for number, name in enumerate(corpus.groups[:3]):
        rows = np.flatnonzero(corpus.group[:, 0] == number)
        if len(rows):
            row = rows[0]
            real = corpus.document[row] >= 0
            ids = corpus.inputs["input_ids"][row].numpy()[real][:READ].tolist()
            steps = said.depths[row][real][:READ].tolist()
            texts.append({"topic": name, "tokens": pieces(loaded.tokenizer, ids), "steps": steps,
                          "mean_depth": round(float(np.mean(steps)), 3)})  # fmt: skip
    return texts


# pictures


@draw
def small(lines: Sequence[tuple[Sequence[int], Sequence[float]]], low: float, high: float):
    """One layer's signs over the training steps, in the order of `STYLES`; low..high: the range of all layers."""
    figure, axes = _axes(3.0, 1.75)
    for (steps, values), (colour, dashes, _) in zip(lines, STYLES, strict=False):
        axes.plot(steps, values, color=colour, linestyle=dashes, linewidth=1.5)
    axes.set_ylim(low, high)
    axes.locator_params(axis="x", nbins=4)
    axes.locator_params(axis="y", nbins=4)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("training step")
    return figure


@draw
def losses(rows: Sequence[dict[str, Any]]):
    """Loss against million MACs per token: a line for each rule, a dot for the dense model."""
    figure, axes = _axes(4.8, 3.1)
    for rule, form, (colour, dashes, _) in zip(
        ("threshold", "running", "topk"), ("s", "o", "^"), STYLES, strict=False
    ):
        some = sorted(
            (row for row in rows if row["selection"] == rule), key=lambda row: row["macs_per_token"]
        )
        axes.plot(
            [row["macs_per_token"] / 1e6 for row in some], [row["loss"] for row in some],
            marker=form, color=colour, linestyle=dashes, label="Top-K" if rule == "topk" else rule,
        )  # fmt: skip
    dense = next(row for row in rows if row["selection"] == "dense")
    axes.plot(dense["macs_per_token"] / 1e6, dense["loss"], "D", color=INK, label="dense", linestyle="none")
    axes.axhline(dense["loss"], color=LINE, linewidth=1.2)
    axes.set_xlabel("million MACs per token")
    axes.set_ylabel("loss, nats per token")
    axes.legend()
    return figure


# the page


def _header(d: dict[str, Any]) -> str:
    own, routed = d["own"], ", ".join(map(str, d["routed_layers"]))
    facts = [
        ("parameters", f"{d['parameters']:,}"),
        ("layers per token", f"{own['layers_per_token']:.2f} of {d['num_layers']}"),
        ("capacity, asked", f"{d['capacity']:g}"),
        ("capacity, realised", f"{own['capacity_realised']:.3f}"),
        ("loss, routed", f"{own['loss']:.3f} nats"),
        ("loss, all tokens, all layers", f"{own['whole_loss']:.3f} nats"),
        ("MACs of dense", f"{own['macs_share']:.1%}"),
        ("K/V bytes of dense", f"{own['kv_share']:.1%}"),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    what = (
        f"A {d['kind']} language model of {d['num_layers']} layers. Each of the layers {routed} takes a part of the"
        f" tokens, by the rule “{d['selection']}”; the others go around it, at no cost. “Dense” is the same"
        " weights with every token in every layer."
    )
    return (
        f'<header><div class="kicker">tenuto report</div><h1>{escape(d["name"])}</h1>{_p(what)}<dl>{cells}</dl>'
        f'<p class="note">On {own["tokens"]:,} held-out tokens. Made by</p><pre>{escape(d["command"])}</pre></header>'
    )


def _multiples(history: Sequence[dict[str, Any]], title: str, signs: dict[str, str]) -> str:
    """A picture for each layer, all of one range, and what their lines are; "" where no sign was logged twice."""
    found = series(history)
    # a sign that stands still says nothing, but for a rate to beat
    kept = []
    for sign in signs:
        values = [value for one in found.values() for _, value in one.get(sign, ())]
        moves = len(values) > len(found) and max(values) - min(values) > 1e-3
        if moves or (sign == "majority" and "accuracy" in kept):
            kept.append(sign)
    if not kept:
        return ""
    values = [value for one in found.values() for sign in kept for _, value in one.get(sign, ())]
    room = 0.06 * (max(values) - min(values))
    keys = "".join(
        f'<span><i style="border-top:3px {css}"></i>{escape(signs[sign])}</span>'
        for sign, (*_, css) in zip(kept, STYLES, strict=False)
    )
    pictures = []
    for layer, one in found.items():
        lines = [tuple(zip(*one[sign], strict=True)) if sign in one else ((), ()) for sign in kept]
        svg = small(f"{title}, layer {layer}", lines, min(values) - room, max(values) + room)
        pictures.append(_figure(svg, f"layer {layer}"))
    return f'<div class="keys">{keys}</div><div class="multiples">{"".join(pictures)}</div>'


def _verdict(found: dict[str, Any]) -> str:
    """The outcome of the test in a sentence or two."""
    one, layers = found["overall"], found["layers"]
    first, last = one["first"]["difference"], one["last"]["difference"]
    there = [name for name, layer in layers.items() if layer["shift"]]
    by_layer = (
        f"By layer: in {len(there)} of {len(layers)} ({', '.join(there)})." if there else "By layer: in none."
    )
    if one["shift"]:
        where = "" if one["crossover"] is None else f" They cross at step {one['crossover']:,}."
        return (
            f"Found, over the mean of the layers: S_CU exceeds S_CE by {first:.4f} in the first tenth of the training"
            f" and lies {-last:.4f} below it in the last.{where} {by_layer}"
        )
    why = []
    if not one["above_first"]:
        why.append(
            f"S_CU does not exceed S_CE in the first tenth ({first:+.4f} ± {one['first']['error']:.4f})"
        )
    if not one["below_last"]:
        why.append(f"S_CU is not below S_CE in the last tenth ({last:+.4f} ± {one['last']['error']:.4f})")
    return f"Not found, over the mean of the layers: {' and '.join(why)}. Crossover: none. {by_layer}"


def _cells(part: dict[str, float]) -> tuple[str, str, str]:
    return (
        f"{part['s_cu']:.4f}",
        f"{part['s_ce']:.4f}",
        f"{part['difference']:+.4f} ± {part['error']:.4f}",
    )


def _surprise(d: dict[str, Any]) -> str:
    title, found = "Does novelty give way to prediction?", d["shift"]
    if found is None:
        computes = any(key.endswith(".s_cu") for row in d["history"] for key in row)
        why = (
            "Fewer than five logs of it were kept: nothing to test."
            if computes
            else "No surprise was logged: Mixture-of-Depths has none, and a converted model was not trained."
        )
        return _section(title, _p(why), _multiples(d["history"], "Gates in training", GATE))
    rows = [
        (name, *(cell for part in ("first", "last") for cell in _cells(one[part])),
         "none" if one["crossover"] is None else f"{one['crossover']:,}", "yes" if one["shift"] else "no")
        for name, one in (*found["layers"].items(), ("mean", found["overall"]))
    ]  # fmt: skip
    columns = ("layer", "first tenth: S_CU", "S_CE", "difference", "last tenth: S_CU", "S_CE", "difference",
               "crossover", "shift")  # fmt: skip
    return _section(
        title,
        _p("The paper has tokens chosen for novelty (S_CU: the change was larger than usual) early in training, and for"
           " what was foreseen (S_CE: expected change) later. The test: the mean S_CU exceeds the mean S_CE in the"
           " first tenth of the training and lies below it in the last, both by more than two standard errors (±,"
           " from how neighbouring logs scatter)."),
        f'<p><b>{escape(_verdict(found))}</b></p>',
        _multiples(d["history"], "Surprise in training", SURPRISE),
        _table(columns, rows),
        _multiples(d["history"], "Gates in training", GATE),
    )  # fmt: skip


def _choice(history: Sequence[dict[str, Any]]) -> str:
    pictures = _multiples(history, "The choice in training", CHOICE)
    if not pictures:
        return ""
    return _section(
        "How the choice went in training",
        _p("The causal router learns to foretell whom Top-K takes; by always giving the commoner answer it would reach"
           " the majority rate."),
        pictures,
    )  # fmt: skip


def _knob(knob: dict[str, Any]) -> str:
    rows = [
        (row["selection"], f"{row['capacity']:g}" if "capacity" in row else "", f"{row['capacity_realised']:.3f}",
         f"{row['loss']:.4f}", "" if row["over_topk_percent"] is None else f"{row['over_topk_percent']:+.2f}",
         f"{100 * row['macs_share']:.1f}", f"{100 * row['kv_share']:.1f}", f"{100 * row['seconds_share']:.1f}")
        for row in knob["rows"]
    ]  # fmt: skip
    columns = ("rule", "capacity", "realised", "loss", "above Top-K %", "MACs %", "K/V %", "time %")
    dear = any(row["selection"] == "topk" and row["macs_share"] > 1 for row in knob["rows"])
    return _section(
        "The knob, beside the dense model",
        _p("Capacity is the share of the tokens that a routed layer takes. “threshold” asks a level, calibrated on"
           " other text, of every score; “running” takes the highest of the last scores; both decide token by token"
           " and can write. Top-K sees the whole text: an upper bound, no rule to decode by."
           + (" Its scores take the layer's result on every token, which is dearer than dense." if dear else "")),
        _figure(losses("Loss against MACs", knob["rows"]), "Lower and further left is better. The level line: dense."),
        _table(columns, rows),
        f'<p class="note">{knob["tokens"]:,} held-out tokens; shares are of the dense model.</p>',
    )  # fmt: skip


def _routers(d: dict[str, Any]) -> str:
    routers = d["routers"]
    own = any("router" in one for one in routers.values())
    rows = [
        (layer, f"{d['own']['layers'][layer]:.3f}", f"{100 * one['alike']:.1f}", f"{100 * one['majority']:.1f}",
         f"{one['f1']:.3f}", *((f"{100 * one['router']:.1f}", f"{100 * one['router_majority']:.1f}",
                                f"{one['router_f1']:.3f}", "yes" if one["beats"] else "no") if own else ()))
        for layer, one in routers.items()
    ]  # fmt: skip
    columns = ("layer", "share taken", "as Top-K %", "majority %", "F1",
               *(("router right %", "its majority %", "its F1", "beats majority") if own else ()))  # fmt: skip
    weak = [layer for layer, one in routers.items() if not one.get("beats", True)]
    said = "Every layer beats the majority rate." if own else ""
    if weak:
        said = f"No better than giving the commoner answer always: layer{'s' * (len(weak) > 1)} {', '.join(weak)}."
    return _section(
        "Does the causal choice foretell Top-K?",
        _p("Training takes the highest scores of a whole text (Top-K); in use a token is decided on without the later"
           " ones. How many held-out tokens are decided alike, beside what the commoner answer alone would reach."
           + (" The router's own columns: against the Top-K of its teacher, the surprise." if own else "")),
        f"<p><b>{escape(said)}</b></p>" if said else "",
        _table(columns, rows),
    )  # fmt: skip


def _executed(executed: dict[str, Any]) -> str:
    tables = []
    for part, title in PARTS.items():
        rows = [
            (name, f"{row['tokens']:,}", f"{row['mean']:.3f}", "{:.3f} .. {:.3f}".format(*row["interval"]),
             f"{row['effect']:+.2f}" if "effect" in row else "")
            for name, row in executed[part].items()
        ]  # fmt: skip
        table = _table(("", "tokens", "share run", "95% interval", "effect d"), rows)
        tables.append(f"<div><h3>{escape(title)}</h3>{_p(executed['says'][part])}{table}</div>")
    return _section(
        "Which tokens the layers take",
        _p(f"The share of the routed layers that a token ran, {executed['share']:.3f} on average; intervals by"
           " resampling documents, effects as Cohen's d against all other tokens."),
        _grid(*tables),
        _p("Rank correlation of that share with the dense model's loss on the next token:"
           f" {executed['correlation_with_loss']:+.3f}. Above zero: layers go where the next token is hard."),
    )  # fmt: skip


def _texts(d: dict[str, Any]) -> str:
    full, floor = d["num_layers"], d["num_layers"] - len(d["routed_layers"])
    blocks = []
    for one in (*d["read"], *d["written"]):
        chips = "".join(
            f'<span class="w d{step - floor + 1}{" p" if place < one.get("prompt", 0) else ""}"'
            f' title="{step} of {full} layers">{escape(token)}</span>'
            for place, (token, step) in enumerate(zip(one["tokens"], one["steps"], strict=True))
        )
        what = f"held-out text, {one['topic']}" if "topic" in one else f"written at {one['setting']}"
        note = f"{what}: {one['mean_depth']:.2f} of {full} layers per token"
        blocks.append(f'<div class="pair"><h3>{escape(note)}</h3><div class="text">{chips}</div></div>')
    if not blocks:
        return ""
    legend = "".join(f'<i class="d{step - floor + 1}">{step}</i>' for step in range(floor, full + 1))
    return _section(
        "Token by token",
        _p("Text that the model read, and beginnings (underlined) that it went on with; each token is coloured by the"
           " layers that were run to predict the next one."),
        f'<div class="legend"><span>{legend}</span>layers</div>',
        *blocks,
    )  # fmt: skip


def routed_page(d: dict[str, Any]) -> str:
    """The HTML of `measure_routed`'s figures."""
    # layers per token in training are Top-K's, always the same
    losses_only = [{key: value for key, value in row.items() if key != "depth/mean"} for row in d["history"]]
    body = "".join(
        (
            _header(d),
            _training(losses_only, "Training", "Measured while the model was trained."),
            _surprise(d),
            _choice(d["history"]),
            _knob(d["knob"]),
            _routers(d),
            _executed(d["executed"]),
            _texts(d),
        )
    )
    sheet = _css(len(d["routed_layers"]) + 1) + SHEET
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>tenuto report: {escape(d['name'])}</title><style>{sheet}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )
