"""The report as one HTML file: no scripts, nothing fetched, light and dark, readable on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import figures as draw


def _css(steps: int) -> str:
    scale = draw.depth_scale(steps)
    light = "".join(f"--d{n}:{one[0]};--t{n}:{one[1]};" for n, one in enumerate(scale, 1))
    dark = "".join(f"--d{n}:{one[2]};--t{n}:{one[3]};" for n, one in enumerate(scale, 1))
    chips = "".join(f".d{n}{{background:var(--d{n});color:var(--t{n})}}" for n in range(1, steps + 1))
    sheet = Path(__file__).with_name("report.css").read_text().partition("*/")[2].strip()
    return sheet.replace("LIGHT", light).replace("DARK", dark) + chips


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _grid(*figures: str) -> str:
    return f'<div class="grid">{"".join(figures)}</div>'


def _table(columns: Sequence[str], rows: Sequence[Sequence], left: Sequence[int] = ()) -> str:
    def cells(tag: str, row: Sequence) -> str:
        marks = (' class="l"' if number in left else "" for number in range(len(row)))
        return "".join(
            f"<{tag}{mark}>{escape(str(cell))}</{tag}>" for cell, mark in zip(row, marks, strict=True)
        )

    head = f"<thead><tr>{cells('th', columns)}</tr></thead>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _p(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _head(d: dict[str, Any]) -> str:
    total = sum(one["pairs"] for one in d["sets"].values())
    tests = [one for name, one in d["sets"].items() if name != "validation"]
    pairs = sum(one["pairs"] for one in tests)
    accuracy = sum(one["accuracy"] * one["pairs"] for one in tests) / pairs
    always = sum(one["always_independent"] * one["pairs"] for one in tests) / pairs
    facts = [
        ("parameters", f"{d['parameters']:,}"),
        ("right on the tests", f"{accuracy:.1f}%"),
        ("always #", f"{always:.1f}%"),
        ("right on validation", f"{d['sets']['validation']['accuracy']:.1f}%"),
        ("steps per token", f"{d['depth']['mean']:.2f} of {d['full_depth']}"),
        ("pairs looked at", f"{total:,}"),
    ]
    figures = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    sampled = ", ".join(f"{name}: {few:,} of {many:,}" for name, (few, many) in d["pairs"].items())
    stops = "each token for as many steps as it needs" if d["halting"] else "every token for all of its steps"
    task = (
        f"A {d['architecture']} reads two propositional sentences and says which of seven relations"
        f" holds between them. It runs {stops}, {d['full_depth']} at most."
    )
    return (
        f'<header><div class="kicker">tenuto report</div><h1>{escape(d["preset"])}</h1>'
        f"{_p(task)}<dl>{figures}</dl>"
        f'<p class="note">Made by</p><pre>{escape(d["command"])}</pre>'
        f'<p class="note">Pairs sampled of each set: {escape(sampled)}. “Always #” is the rate of a model'
        f" that answers independence to everything.</p></header>"
    )


def _training(history: Sequence[dict], title: str, text: str, floor: float | None = None) -> str:
    wanted = (
        ("loss", 1, "loss", "The training loss; on a flat stretch nothing is being learnt."),
        ("eval_accuracy", 100, "validation, percent right", "How much of the validation set is right."),
        ("eval_exact", 100, "validation, percent exact", "Answers written greedily that equal the target."),
        ("eval_loss", 1, "validation loss", "The loss on held-out text."),
        ("depth/mean", 1, "mean steps", "Steps per token while training. Falling: the model learns to stop."),
    )
    pictures = []
    for key, unit, name, caption in wanted:
        rows = [(row["step"], unit * row[key]) for row in history if key in row]
        if len(rows) > 1:
            low = floor if key == "eval_accuracy" else None
            svg = draw.curve(f"{title}: {name}", *zip(*rows, strict=True), name, low)
            pictures.append(_figure(svg, caption))
    return _section(title, _p(text), _grid(*pictures)) if pictures else ""


def _accuracy(d: dict[str, Any]) -> str:
    rows = d["by_operators"]
    keys = list(rows)
    trained = d["trained_operators"]
    edges = [n for n, (a, b) in enumerate(pairwise(keys)) if int(a) <= trained < int(b.rstrip("+"))]
    boundary = edges[0] + 0.5 if edges else None
    svg = draw.accuracy_by(
        "Accuracy by operator count",
        keys,
        *([row[name] for row in rows.values()] for name in ("accuracy", "always_independent", "interval")),
        boundary,
    )
    caption = "Bars are 95% intervals; the dashed line answers # always. What lies above it was worked out."
    relations = d["by_relation"]
    names = [f"{one}  ({row['pairs']})" for one, row in relations.items()]
    errors = draw.bars(
        "Accuracy by relation", names, [row["accuracy"] for row in relations.values()], "percent right"
    )
    table = _table(
        ("operators", "pairs", "right %", "95% interval", "always # %"),
        [
            (key, row["pairs"], f"{row['accuracy']:.1f}", "{:.1f}..{:.1f}".format(*row["interval"]),
             f"{row['always_independent']:.1f}")
            for key, row in rows.items()
        ],
    )  # fmt: skip
    taken = _table(
        ("true relation", "pairs", "right %", "most often taken for (times)"),
        [
            (one, row["pairs"], f"{row['accuracy']:.1f}",
             ",  ".join(f"{other} {count}" for other, count in row["taken_for"].items()) or "-")
            for one, row in relations.items()
        ],
        left=(3,),
    )  # fmt: skip
    return _section(
        "How often it is right",
        _p("More operators make a longer and deeper formula. Pairs count by their longer sentence."),
        _grid(
            _figure(svg, caption),
            _figure(
                errors,
                "By true relation (pairs). A model that leans on # shows it here.",
            ),
        ),
        _grid(table, taken),
    )


def _depth(d: dict[str, Any]) -> str:
    full, rows, kinds = d["full_depth"], d["by_operators"], d["by_kind"]
    if not d["halting"]:
        return _section("How deep it goes", _p(f"Fixed depth: every token runs all {full} steps."))
    spread = d["depth"]["spread"]
    warning = (
        "" if spread >= 0.1 else _p("The depths have collapsed: all tokens stop at about the same step.")
    )
    operators = draw.depth_by_operators(
        "Mean depth by operator count",
        list(rows),
        *([row[k] for row in rows.values()] for k in ("mean", "spread")),
        full,
    )
    shares = draw.depth_shares(
        "Depth by kind of token",
        list(kinds),
        *([row[k] for row in kinds.values()] for k in ("histogram", "mean")),
    )
    histogram = draw.depth_histogram("Histogram of depth", d["depth"]["histogram"])
    table = _table(
        ("operators", "mean steps", "spread"),
        [(key, f"{row['mean']:.2f}", f"{row['spread']:.2f}") for key, row in rows.items()],
    )
    kinds_table = _table(
        ("kind of token", "mean steps", "spread"),
        [(key, f"{row['mean']:.2f}", f"{row['spread']:.2f}") for key, row in kinds.items()],
    )
    return _section(
        "How deep it goes",
        _p(f"A token stops by itself; the stack ends at {full} steps. The mean is"
           f" {d['depth']['mean']:.2f}, with a spread (standard deviation) of {spread:.2f}."),
        warning,
        _grid(
            _figure(operators, "Mean steps per token; band: one standard deviation, dashed: full depth."),
            _figure(histogram, "Where tokens stop, over everything looked at."),
            _figure(shares, "By kind of token: the further from the page's own colour, the deeper."),
        ),
        _grid(table, kinds_table),
    )  # fmt: skip


def _knob(sweep: dict[str, Any] | None) -> str:
    if sweep is None:
        return ""
    rows = sweep["rows"]
    table = _table(
        ("threshold", "steps", "skipped %", "MACs / pair", "MACs %", "seconds", "time %", "right %",
         "difference [95%]"),
        [
            (f"{row['threshold']:g}", f"{row['steps']:.2f}", f"{row['steps_skipped']:.1f}",
             f"{row['macs_per_pair'] / 1e6:.1f} M", f"{100 * row['macs_share']:.1f}", f"{row['seconds']:.2f}",
             f"{100 * row['seconds_share']:.1f}", f"{row['accuracy']:.2f}",
             "{:+.2f} [{:+.2f}, {:+.2f}]".format(row["difference"], *row["difference_interval"]))
            for row in rows
        ],
    )  # fmt: skip
    return _section(
        "The knob",
        _p("After training, one number decides how sure a token must be before it stops: the threshold on"
           " its spent halting mass. At 1 nobody stops. A stopped token is not computed again, so the work"
           " saved is real."),
        _grid(
            _figure(draw.knob("Accuracy against steps skipped", rows),
                    "Further right is cheaper. The best settings lie to the right without having come down."),
            _figure(draw.costs("Steps, MACs and time by threshold", rows, sweep["full_depth"]),
                    "What is left of the work. Wall-clock follows MACs when rows are really left out."),
        ),
        table,
        f'<p class="note">{sweep["pairs"]:,} test pairs; MACs of the whole model. Differences are against'
        " threshold 1 on the same pairs.</p>",
    )  # fmt: skip


def _experts(usage: dict[str, Any] | None) -> str:
    if usage is None:
        return ""
    pictures, tables = [], []
    for name, router in usage["routers"].items():
        part = "feed-forward" if "feed" in name else "attention"
        shares = [100 * share for share in router["usage"]]
        even = 100 / len(shares)
        label = f"Expert usage, {part}"
        svg = draw.bars(label, [str(n) for n in range(len(shares))], shares, "percent of choices", even)
        idle = f"{len(router['dead'])} never chosen" if router["dead"] else "all are used"
        caption = f"{part.capitalize()} experts; the dashed line is an even share, {idle}."
        pictures.append(_figure(svg, f"{caption} Entropy {router['entropy']:.3f} of 1."))
        rows = [
            (number, f"{100 * router['usage'][int(number)]:.1f}",
             " · ".join(f"{one['token']} {one['pmi']:+.2f}" for one in tokens[:3]))
            for number, tokens in router["specific"].items()
        ]  # fmt: skip
        tables.append(_table((part, "share %", "most specific tokens"), rows, left=(2,)))
    return _section(
        "Who serves whom",
        _p("Routers send every token to a few experts at every step."),
        _grid(*pictures),
        _p(
            "Most specific tokens, by pointwise mutual information in nats: +0.7 is twice as often as chance."
        ),
        _grid(*tables),
    )


def _pairs(d: dict[str, Any]) -> str:
    full = d["full_depth"]
    legend = "".join(f'<i class="d{n}">{n}</i>' for n in range(1, full + 1))
    blocks = []
    for one in d["examples"]:
        chips = [
            f'<span class="t d{step}" title="{escape(token)}: {step} of {full} steps">'
            f"{escape(token)}<small>{step}</small></span>"
            for token, step in zip(one["tokens"], one["steps"], strict=True)
        ]
        # the separator opens the second line, as the first token opens the first
        cut = one["tokens"].index("#SEP#")
        sides = "".join(f'<div class="side">{"".join(part)}</div>' for part in (chips[:cut], chips[cut:]))
        verdict = "right" if one["relation"] == one["answer"] else f"wrong, the model says {one['answer']}"
        plural = "operator" if one["operators"] == 1 else "operators"
        title = f"{one['operators']} {plural} · <b>{escape(one['relation'])}</b> · {escape(verdict)}"
        blocks.append(f'<div class="pair"><h3>{title}</h3>{sides}</div>')
    return _section(
        "Token by token",
        _p("Real pairs, each token coloured by the step after which it stopped; the small number says which."
           " Of each operator count it is the sampled pair of most usual length that the model gets right,"
           " # left out where possible; one that it gets wrong comes last."),
        f'<div class="legend"><span>{legend}</span>steps</div>',
        *blocks,
    )  # fmt: skip


def _language(act: dict[str, Any] | None, scale: int) -> str:
    if act is None:
        return ""
    full = act["full_depth"]

    def colour(step: int) -> int:
        # the page has one scale of colours, made for the classifier's depth
        return 1 + round((step - 1) * (scale - 1) / max(1, full - 1))

    blocks = []
    for one in act["texts"]:
        chips = "".join(
            f'<span class="w d{colour(step)}{" p" if place < one["prompt"] else ""}" title="{step} of {full} loops">'
            f"{escape(token)}</span>"
            for place, (token, step) in enumerate(zip(one["tokens"], one["steps"], strict=True))
        )
        note = f"{one['mean_depth']:.2f} of {full} loops per token at threshold {one['threshold']:g}"
        blocks.append(f'<div class="pair"><h3>{escape(note)}</h3><div class="text">{chips}</div></div>')
    legend = "".join(f'<i class="d{colour(n)}">{n}</i>' for n in range(1, full + 1))
    return _section(
        "A language model writes",
        _p(f"A looped language model of {act['parameters']:,} parameters goes on with beginnings (underlined)."
           " Each token is coloured by the loops that were run to predict the next one."),
        f'<pre>{escape(act["command"])}</pre>',
        f'<div class="legend"><span>{legend}</span>loops</div>',
        *blocks,
    )  # fmt: skip


def page(d: dict[str, Any], live: dict[str, Any] | None = None) -> str:
    """The HTML of `report.measure`'s figures; `live` is a demo's own short training."""
    text = "Measured while the model was trained."
    training = _training(d["training"]["history"], "Training", text)
    if live:
        training += _training(live["history"], "Trained just now", live["text"], live["always"])
    body = "".join(
        (_head(d), training, _accuracy(d), _depth(d), _knob(d["knob"]), _experts(d["experts"]), _pairs(d),
         _language(d.get("language"), d["full_depth"]))
    )  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>tenuto report: {escape(d['preset'])}</title><style>{_css(d['full_depth'])}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )
