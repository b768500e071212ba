"""The report of a text-to-text checkpoint: quality by set beside its baselines, depth, the knob, experts, examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from . import figures as draw
from .expert_picture import serving, spoken
from .figures import ACCENT, MUTED
from .page import _css, _figure, _grid, _p, _section, _table, _training

THRESHOLDS = (0.99, 0.9, 0.7, 0.5, 0.3)


def measure_pairs_report(
    checkpoint: str | Path, limit: int = 500, thresholds: Sequence[float] = THRESHOLDS, repeats: int = 2
) -> dict[str, Any]:
    """Everything that the report shows, as plain numbers.

    At most `limit` examples of each set, spread evenly over it; answers are written greedily. The knob is turned on
    the validation part.
    """
    from .depths import describe
    from .evaluate import load
    from .expert_usage import expert_usage
    from .report import _spoken, made_by
    from .sweep_pairs import full_depths, knob_pairs, spread
    from .translate import answer, commonest_target, quality, test_pairs

    loaded = load(checkpoint)
    config, full = loaded.model.config, full_depths(loaded.model)
    tests = loaded.recipe.data.sequences is not None or loaded.recipe.data.parallel.test
    names = ["validation", *(test_pairs(loaded) if tests else ())]
    every = test_pairs(loaded, names)
    sets = {name: spread(pairs, limit) for name, pairs in every.items()}
    said = {name: answer(loaded, pairs, progress=f"set {name}") for name, pairs in sets.items()}
    constant = commonest_target(loaded)
    halting = getattr(config, "policy", "fixed") != "fixed"
    trained = Path(checkpoint) / "training.json"
    return {
        "checkpoint": str(checkpoint),
        "name": loaded.recipe.preset or loaded.recipe.start,
        "architecture": _spoken(type(loaded.model).__name__),
        "command": made_by(checkpoint)["command"],
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "full_depth": full,
        "halting": halting,
        "examples": {name: [len(pairs), len(every[name])] for name, pairs in sets.items()},
        "history": json.loads(trained.read_text())["history"] if trained.is_file() else [],
        "measure": "bleu" if constant is None else "exact",
        "sets": {name: quality(loaded, pairs, said[name], constant) for name, pairs in sets.items()},
        "depths": {
            name: {
                side: describe(np.concatenate(depths), full[side])
                for side, depths in (("encoder", one.encoder_depths), ("decoder", one.decoder_depths))
            }
            for name, one in said.items()
        },
        "knob": knob_pairs(loaded, sets["validation"], thresholds, repeats) if halting else None,
        "experts": expert_usage(checkpoint, names, limit)
        if max(config.attention_experts, config.ffn_experts) > 1
        else None,
        "texts": [
            one
            for name in names
            for one in _texts(loaded, name, sets[name], said[name], 3 if name == "validation" else 2)
        ],
    }


def _texts(loaded, name: str, pairs: Sequence[tuple], said, count: int) -> list[dict[str, Any]]:
    """`count` examples of a set, of usual length, with the steps of each token of the source and of the answer."""
    from .data.parallel import encode_lines
    from .written import pieces

    words = loaded.tokenizer
    lengths = np.array([len(depths) for depths in said.encoder_depths])
    usual = np.argsort(np.abs(lengths - np.median(lengths)), kind="stable")[:count]
    found = []
    for place in usual.tolist():
        source, target = pairs[place][:2]
        read = encode_lines([source], words)[0].tolist()
        found.append(
            {
                "set": name,
                "source": pieces(words, read),
                "source_steps": said.encoder_depths[place].tolist(),
                "answer": pieces(words, said.ids[place]),
                "answer_steps": said.decoder_depths[place].tolist(),
                "target": target,
                "right": bool(said.texts[place] == target),
            }
        )
    return found


@draw.draw
def quality_by_cost(rows: Sequence[dict], measure: str, name: str):
    """BLEU or exact match against the share of MACs, with the interval of the difference from full depth."""
    figure, axes = draw._axes()
    x, y = (np.array([row[key] for row in rows]) for key in ("macs_share", measure))
    bounds = np.array([row["difference_interval"] for row in rows]) + y[0]
    spans = [np.clip(y - bounds[:, 0], 0, None), np.clip(bounds[:, 1] - y, 0, None)]
    axes.errorbar(100 * x, y, spans, color=ACCENT, marker="o", elinewidth=1.1)
    last = None
    for row, left, height in zip(rows, 100 * x, y, strict=True):
        if last is None or abs(left - last) > 3:
            axes.annotate(f"{row['threshold']:g}", (left, height), xytext=(4, 6), textcoords="offset points",
                          fontsize=8.5, color=MUTED)  # fmt: skip
            last = left
    axes.set_xlabel("MACs, percent of full depth; threshold at the dots")
    axes.set_ylabel(name)
    axes.margins(0.1, 0.2)
    return figure


MEASURES = {"bleu": "BLEU", "exact": "exact match, percent"}


def _header(d: dict[str, Any]) -> str:
    measure, first = d["measure"], d["sets"]["validation"]
    sides = d["depths"]["validation"]
    facts = [
        ("parameters", f"{d['parameters']:,}"),
        *((f"{MEASURES[measure].split(',')[0]}, {name}", f"{row[measure]:.1f}") for name, row in d["sets"].items()),
        *((f"steps, {side}", f"{sides[side]['mean']:.2f} of {full}") for side, full in d["full_depth"].items()),
        ("MACs per token", f"{first['macs_per_token'] / 1e6:.2f} M"),
    ]  # fmt: skip
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in facts)
    stops = "each token for as many steps as it needs" if d["halting"] else "every token for all of its steps"
    sampled = ", ".join(f"{name}: {few:,} of {many:,}" for name, (few, many) in d["examples"].items())
    task = f"A {d['architecture']} reads a text and writes another, token by token. It runs {stops}."
    return (
        f'<header><div class="kicker">tenuto report</div><h1>{escape(d["name"])}</h1>'
        f"{_p(task)}"
        f'<dl>{cells}</dl><p class="note">Made by</p><pre>{escape(d["command"])}</pre>'
        f'<p class="note">Examples of each set: {escape(sampled)}; answers written greedily.</p></header>'
    )


def _quality(d: dict[str, Any]) -> str:
    measure = d["measure"]
    keys = ("bleu", "split_bleu", "copy_bleu") if measure == "bleu" else ("exact", "majority", "copy")
    titles = {"bleu": "BLEU", "split_bleu": "BLEU, compounds apart", "copy_bleu": "source copied, BLEU",
              "exact": "exact %", "majority": "commonest answer %", "copy": "source copied %"}  # fmt: skip
    table = _table(
        ("set", "examples", *(titles[key] for key in keys), "MMACs / token", "tokens / s"),
        [
            (name, f"{row['examples']:,}", *(f"{row[key]:.2f}" for key in keys),
             f"{row['macs_per_token'] / 1e6:.3f}", f"{row['tokens_per_second']:,}")
            for name, row in d["sets"].items()
        ],
    )  # fmt: skip
    kinds = [
        f"<div><h3>{escape(name)}</h3>"
        + _table(
            ("kind", "examples", "exact %"),
            [(kind, one["examples"], f"{one['exact']:.1f}") for kind, one in row["by_kind"].items()],
        )
        + "</div>"
        for name, row in d["sets"].items()
        if len(row.get("by_kind", ())) > 1
    ]
    signature = d["sets"]["validation"].get("signature")
    note = f'<p class="note">{escape(signature)}</p>' if signature else ""
    return _section("How good the answers are", table, note, _grid(*kinds) if kinds else "")


def _depth(d: dict[str, Any]) -> str:
    if not d["halting"]:
        return _section("How deep it goes", _p("Fixed depth: every token runs all steps."))
    names, histograms, means = [], [], []
    most = max(d["full_depth"].values())
    for name, sides in d["depths"].items():
        for side, word in (("encoder", "read"), ("decoder", "written")):
            names.append(f"{name}, {word}")
            shares = sides[side]["histogram"]
            histograms.append([*shares, *[0.0] * (most - len(shares))])
            means.append(sides[side]["mean"])
    flat = [
        f"{name}, {side}"
        for name, sides in d["depths"].items()
        for side, one in sides.items()
        if one["spread"] < 0.1
    ]
    warning = _p(f"The depths have collapsed ({'; '.join(flat)}): all tokens stop alike.") if flat else ""
    svg = draw.depth_shares("Depth of the tokens read and written", names, histograms, means)
    return _section(
        "How deep it goes",
        warning,
        _figure(svg, "Tokens of the sources, and of the answers that the model wrote itself."),
    )


def _knob(d: dict[str, Any]) -> str:
    knob, measure = d["knob"], d["measure"]
    if knob is None:
        return ""
    rows = [
        (f"{row['threshold']:g}", f"{row['encoder_skipped']:.1f}", f"{row['decoder_skipped']:.1f}",
         f"{100 * row['macs_share']:.1f}", f"{100 * row['seconds_share']:.1f}", f"{row[measure]:.2f}",
         "{:+.2f} [{:+.2f}, {:+.2f}]".format(row["difference"], *row["difference_interval"]))
        for row in knob["rows"]
    ]  # fmt: skip
    columns = ("threshold", "skipped, encoder %", "skipped, decoder %", "MACs %", "time %", MEASURES[measure],
               "difference [95%]")  # fmt: skip
    svg = quality_by_cost(
        f"{MEASURES[measure]} against MACs", knob["rows"], knob["measure"], MEASURES[measure]
    )
    return _section(
        "The knob",
        _p("The threshold on a token's spent halting mass, in both stacks; at 1 nobody stops. The decoder reads what it"
           " wrote itself. Differences are against threshold 1 on the same examples (paired bootstrap)."),
        _figure(svg, "Further left is cheaper. The best settings lie to the left without having come down."),
        _table(columns, rows),
        f'<p class="note">{knob["examples"]:,} validation examples.</p>',
    )  # fmt: skip


def experts_section(usage: dict[str, Any] | None) -> str:
    """Who serves whom: a picture and the most specific tokens of each router; "" without routers."""
    if usage is None:
        return ""
    pictures, tables = [], []
    for name, router in usage["routers"].items():
        idle = f"never chosen: {', '.join(map(str, router['dead']))}" if router["dead"] else "all are used"
        if router["faint"]:
            idle += f"; below a tenth of an even share: {', '.join(map(str, router['faint']))}"
        caption = (
            f"{spoken(name).capitalize()}: entropy of the usage {router['entropy']:.3f} of 1, {idle}. A token says"
            f" {router['information']:.2f} nats about its expert."
        )
        pictures.append(_figure(serving(f"Experts, {spoken(name)}", router), caption))
        rows = [
            (number, f"{100 * router['usage'][int(number)]:.1f}",
             " · ".join(f"{one['token']} {one['pmi']:+.2f}" for one in tokens[:4]))
            for number, tokens in router["specific"].items()
        ]  # fmt: skip
        title = f"<h3>{escape(spoken(name))}</h3>"
        tables.append(
            f"<div>{title}{_table(('expert', 'share %', 'most specific tokens'), rows, left=(2,))}</div>"
        )
    return _section(
        "Who serves whom",
        _p("Routers send every token to a few experts at every step. A square's strength is the share of the token's"
           " choices (row) that went to the expert (column). A decoder's token is the one that it reads."),
        _grid(*pictures),
        _p("Most specific tokens, by pointwise mutual information in nats: +0.7 is twice as often as chance."),
        _grid(*tables),
    )  # fmt: skip


def _tokens(d: dict[str, Any]) -> str:
    full, blocks = max(d["full_depth"].values()), []
    for one in d["texts"]:
        sides = []
        for part in ("source", "answer"):
            chips = "".join(
                f'<span class="w d{step}" title="{step} steps">{escape(token)}</span>'
                for token, step in zip(one[part], one[f"{part}_steps"], strict=True)
            )
            sides.append(f'<div class="text">{chips}</div>')
        verdict = "right" if one["right"] else f"expected: {one['target']}"
        blocks.append(
            f'<div class="pair"><h3>{escape(one["set"])} · {escape(verdict)}</h3>{"".join(sides)}</div>'
        )
    legend = "".join(f'<i class="d{n}">{n}</i>' for n in range(1, full + 1))
    return _section(
        "Token by token",
        _p("Sources, and below each what the model wrote; each token is coloured by the steps it ran."),
        f'<div class="legend"><span>{legend}</span>steps</div>',
        *blocks,
    )


def pairs_page(d: dict[str, Any]) -> str:
    """The HTML of `measure_pairs_report`'s figures."""
    body = "".join(
        (
            _header(d),
            _training(d["history"], "Training", "Measured while the model was trained."),
            _quality(d),
            _depth(d),
            _knob(d),
            experts_section(d["experts"]),
            _tokens(d),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>tenuto report: {escape(d['name'])}</title><style>{_css(max(d['full_depth'].values()))}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )
