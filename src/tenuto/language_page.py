"""The report of a language model: depth by topic, kind, frequency, position; the knob beside fixed depths; text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from . import figures as draw
from .page import _css, _figure, _grid, _language, _p, _section, _table, _training

THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
PROMPTS = ("It was ", "There were 12 ", "def ")
PARTS = {
    "by_topic": "Topics, as measured",
    "by_topic_adjusted": "Topics at the same loss after one loop, frequency and position",
    "by_kind": "Kinds of token",
    "by_frequency": "Frequency of the token",
    "by_position": "Position in the document",
    "by_loss_at_depth_1": "How hard the next token is after one loop",
}


def measure_language(
    checkpoint: str | Path, limit: int | None = None, prompts: Sequence[str] = PROMPTS
) -> dict[str, Any]:
    """Everything that the report shows, as plain numbers."""
    import json

    from .evaluate import load
    from .language_sweep import sweep_language
    from .report import made_by
    from .text_depths import text_depths
    from .written import write

    loaded = load(checkpoint)
    config = loaded.model.config
    knob = None
    if config.policy != "fixed":
        knob = sweep_language(checkpoint, THRESHOLDS, repeats=2, limit=limit)
    trained = Path(checkpoint) / "training.json"
    texts = [write(loaded.model, loaded.tokenizer, prompt, 60) for prompt in prompts]
    return {
        "name": f"{loaded.recipe.preset or loaded.recipe.start}, {config.policy}",
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "full_depth": config.num_loops,
        "policy": config.policy,
        "command": made_by(checkpoint)["command"],
        "history": json.loads(trained.read_text())["history"] if trained.is_file() else [],
        "depths": text_depths(checkpoint, limit=limit),
        "knob": knob,
        "texts": [{**asdict(one), "mean_depth": round(one.mean_depth, 3)} for one in texts],
    }


def _header(d: dict[str, Any]) -> str:
    depths = d["depths"]
    facts = [
        ("parameters", f"{d['parameters']:,}"),
        ("loops per token", f"{depths['mean_depth']:.2f} of {d['full_depth']}"),
        ("tokens looked at", f"{depths['tokens']:,}"),
        ("loss at full depth", f"{depths['oracle']['loss_by_depth'][-1]:.3f} nats"),
        ("oracle's headroom", f"{depths['oracle']['headroom']:.3f} nats"),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    collapsed = _p(f"The depths have collapsed: {depths['advice']}.") if depths["advice"] else ""
    return (
        f'<header><div class="kicker">tenuto report</div><h1>{escape(d["name"])}</h1>'
        f"{_p('A looped language model: one core of layers, run again for the tokens that need it.')}"
        f"<dl>{cells}</dl>{collapsed}"
        f'<p class="note">Made by</p><pre>{escape(d["command"])}</pre></header>'
    )


def _groups(depths: dict[str, Any]) -> str:
    tables = []
    for part, title in PARTS.items():
        rows = [
            (name, f"{row['tokens']:,}" if "tokens" in row else "", f"{row['mean']:.3f}",
             "{:.3f} .. {:.3f}".format(*row["interval"]), f"{row['effect']:+.2f}" if "effect" in row else "")
            for name, row in depths[part].items()
        ]  # fmt: skip
        columns = ("", "tokens", "loops", "95% interval", "effect d")
        tables.append(f"<div><h3>{escape(title)}</h3>{_table(columns, rows)}</div>")
    notes = [f"{name} {value:+.3f}" for name, value in depths["correlation"].items()]
    return _section(
        "Where the loops go",
        _p("Mean loops of the tokens that were read; intervals by resampling documents, effects as Cohen's d against"
           " all other tokens."),
        _grid(*tables),
        _p(f"Rank correlation of depth: {'; '.join(notes)}."),
    )  # fmt: skip


def _knob(knob: dict[str, Any] | None) -> str:
    if knob is None:
        return ""
    rows = [
        (f"depth {row['max_steps']}" if "max_steps" in row else f"{row['threshold']:g}", f"{row['loss']:.4f}",
         f"{row['loss_percent']:+.2f}", f"{row['mean_depth']:.2f}", f"{row['steps_skipped']:.1f}",
         f"{100 * row['macs_share']:.1f}", f"{100 * row['seconds_share']:.1f}",
         f"{row['saved_over_fixed']:+.4f}" if "saved_over_fixed" in row else "")
        for row in (*knob["fixed"], *knob["rows"])
    ]  # fmt: skip
    columns = (
        "setting",
        "loss",
        "% above full",
        "loops",
        "skipped %",
        "MACs %",
        "time %",
        "better than fixed",
    )
    return _section(
        "The knob, beside every fixed depth",
        _p("A threshold decides token by token; a fixed depth gives all tokens the same loops. The last column is the"
           " loss saved against a fixed depth of the same MACs, in nats: below zero, the policy is not worth having."),
        _figure(draw.trade("Loss against MACs", knob["fixed"], knob["rows"]),
                "Circles: fixed depths. Squares: thresholds. Lower and further left is better."),
        _table(columns, rows),
    )  # fmt: skip


def language_page(d: dict[str, Any]) -> str:
    """The HTML of `measure_language`'s figures."""
    act = {**d, "texts": d["texts"]}
    body = "".join(
        (
            _header(d),
            _training(d["history"], "Training", "Measured while the model was trained."),
            _groups(d["depths"]),
            _knob(d["knob"]),
            _language(act, d["full_depth"]),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>tenuto report: {escape(d['name'])}</title><style>{_css(d['full_depth'])}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )
