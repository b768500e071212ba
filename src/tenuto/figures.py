"""The report's pictures as inline SVG; colours are CSS variables, so that the page decides light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# matplotlib wants real colours: each of these stands for a variable until the SVG is written
INK, MUTED, LINE, ACCENT, SECOND, PAPER = "#010101", "#010102", "#010103", "#010104", "#010105", "#010106"
_VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", ACCENT: "accent", SECOND: "second", PAPER: "paper"}

_STYLE = {
    "svg.fonttype": "none", "font.size": 9.5, "axes.labelsize": 9.5, "xtick.labelsize": 9,
    "ytick.labelsize": 9, "axes.edgecolor": LINE, "axes.labelcolor": MUTED, "text.color": INK,
    "xtick.color": MUTED, "ytick.color": MUTED, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "axes.grid": True, "grid.color": LINE, "grid.linewidth": 0.6,
    "axes.axisbelow": True, "xtick.major.size": 0, "ytick.major.size": 0, "lines.linewidth": 1.8,
    "lines.markersize": 4.5, "legend.frameon": False, "legend.fontsize": 9,
}  # fmt: skip


def depth_scale(steps: int) -> list[tuple[str, str, str, str]]:
    """For each depth 1..steps: colour and text colour on a light page, colour and text colour on a dark one.

    cividis: ordered by lightness, the same for the colour-blind. The deeper, the further from the page.
    """
    cividis = matplotlib.colormaps["cividis"]
    scale = []
    for place in np.linspace(0.02, 0.98, steps):
        entry = []
        for colour in (cividis(1 - place), cividis(place)):
            light = 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]
            entry += [matplotlib.colors.to_hex(colour), "#14171c" if light > 0.5 else "#f4f5f7"]
        scale.append(tuple(entry))
    return scale


def _depth(step: int) -> str:
    return f"#0a00{step:02x}"


def _axes(width: float = 4.6, height: float = 2.9):
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def _svg(figure: Figure, label: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| id="\w+_\d+"| version="[^"]*"| (width|height)="[\d.]+pt"', "", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"#0a00([0-9a-f]{2})", lambda found: f"var(--d{int(found[1], 16)})", svg)
    for colour, name in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def draw(drawing):
    """Decorator: the function's picture in the report's style, as SVG, after its label."""

    def drawn(label: str, *args, **kwargs) -> str:
        with matplotlib.rc_context(_STYLE):
            return _svg(drawing(*args, **kwargs), label)

    drawn.__doc__ = drawing.__doc__
    return drawn


@draw
def curve(steps: Sequence[float], values: Sequence[float], name: str, floor: float | None = None):
    """One quantity over the training steps; `floor` is a rate to beat."""
    figure, axes = _axes(4.6, 2.3)
    if floor is not None:
        axes.axhline(floor, color=MUTED, linestyle=(0, (3, 3)), linewidth=1.2)
        axes.annotate(
            "always #",
            (1, floor),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=MUTED,
            fontsize=9,
        )
    axes.plot(steps, values, color=ACCENT, marker="o" if len(steps) < 25 else None)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("training step")
    axes.set_ylabel(name)
    return figure


@draw
def accuracy_by(keys: Sequence[str], accuracy, baseline, interval, boundary: float | None = None):
    """Percent right for each key with 95% intervals, beside the rate of the constant answer."""
    figure, axes = _axes()
    x = np.arange(len(keys))
    accuracy, (low, high) = np.array(accuracy), np.array(interval).T
    axes.errorbar(
        x,
        accuracy,
        [accuracy - low, high - accuracy],
        color=ACCENT,
        marker="o",
        elinewidth=1.1,
        label="model",
    )
    axes.plot(x, baseline, color=MUTED, linestyle=(0, (3, 3)), linewidth=1.2, label="always #")
    if boundary is not None:
        axes.axvline(boundary, color=LINE, linewidth=1.2)
        axes.annotate(
            "in training | longer",
            (boundary, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 1),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=MUTED,
            fontsize=8.5,
        )
    axes.set_xticks(x, keys)
    axes.set_ylim(min(0, *accuracy) if min(accuracy) < 20 else 20, 102)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("operators in the longer sentence")
    axes.set_ylabel("percent right")
    axes.legend(loc="best")
    return figure


@draw
def bars(names: Sequence[str], values, unit: str, mark: float | None = None):
    """Horizontal bars; `mark` is a vertical reference line."""
    figure, axes = _axes(4.6, 0.75 + 0.27 * len(names))
    y = np.arange(len(names))[::-1]
    axes.barh(y, values, color=ACCENT, height=0.62)
    for place, value in zip(y, values, strict=True):
        axes.annotate(
            f"{value:.1f}", (value, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    if mark is not None:
        axes.axvline(mark, color=MUTED, linestyle=(0, (3, 3)), linewidth=1.2)
    axes.set_xlim(0, max(max(values) * 1.13, 1e-3))
    axes.set_yticks(y, names)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    return figure


@draw
def depth_by_operators(keys: Sequence[str], mean, spread, full: int):
    """Mean steps of the tokens of each operator count; the band is one standard deviation either way."""
    figure, axes = _axes()
    x, mean, spread = np.arange(len(keys)), np.array(mean), np.array(spread)
    axes.fill_between(
        x,
        np.clip(mean - spread, 1, full),
        np.clip(mean + spread, 1, full),
        color=ACCENT,
        alpha=0.16,
        linewidth=0,
    )
    axes.plot(x, mean, color=ACCENT, marker="o")
    axes.axhline(full, color=MUTED, linestyle=(0, (3, 3)), linewidth=1.2)
    axes.set_xticks(x, keys)
    axes.set_ylim(0, full * 1.06)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("operators in the longer sentence")
    axes.set_ylabel("steps per token")
    return figure


@draw
def depth_shares(names: Sequence[str], histograms, means):
    """For each name its tokens' depths as one bar of 100 percent, in the colours of the depth scale."""
    figure, axes = _axes(4.6, 0.75 + 0.3 * len(names))
    y = np.arange(len(names))[::-1]
    left = np.zeros(len(names))
    for step, shares in enumerate(100 * np.array(histograms).T, 1):
        axes.barh(y, shares, left=left, color=_depth(step), height=0.66, linewidth=0)
        left += shares
    for place, mean in zip(y, means, strict=True):
        axes.annotate(
            f"{mean:.1f}", (100, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_xlim(0, 109)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_yticks(y, names)
    axes.grid(visible=False)
    axes.set_xlabel("percent of the tokens; mean at the right")
    return figure


@draw
def depth_histogram(shares: Sequence[float]):
    """Percent of all tokens that stopped after each step."""
    figure, axes = _axes()
    steps = np.arange(1, len(shares) + 1)
    axes.bar(steps, 100 * np.array(shares), color=[_depth(int(step)) for step in steps], width=0.78)
    axes.set_xticks(steps)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("steps")
    axes.set_ylabel("percent of tokens")
    return figure


@draw
def knob(rows: Sequence[dict]):
    """Accuracy against steps skipped, with intervals of the difference to full depth."""
    figure, axes = _axes()
    x, y = np.array([row["steps_skipped"] for row in rows]), np.array([row["accuracy"] for row in rows])
    bounds = np.array([row["difference_interval"] for row in rows]) + y[0]
    axes.errorbar(
        x,
        y,
        [np.clip(y - bounds[:, 0], 0, None), np.clip(bounds[:, 1] - y, 0, None)],
        color=ACCENT,
        marker="o",
        elinewidth=1.1,
    )
    last = None
    for row, left, height in zip(rows, x, y, strict=True):
        if last is None or abs(left - last) > 6:
            axes.annotate(
                f"{row['threshold']:g}",
                (left, height),
                xytext=(4, 6),
                textcoords="offset points",
                fontsize=8.5,
                color=MUTED,
            )
            last = left
    axes.set_xlabel("steps skipped (percent); threshold at the dots")
    axes.set_ylabel("percent right")
    axes.margins(0.08, 0.2)
    return figure


@draw
def costs(rows: Sequence[dict], full: int):
    """Shares of steps, MACs and wall-clock that remain at each threshold."""
    figure, axes = _axes()
    x = np.arange(len(rows))
    for name, values, colour, style in (
        ("steps", [row["steps"] / full for row in rows], MUTED, (0, (3, 3))),
        ("MACs", [row["macs_share"] for row in rows], SECOND, "-"),
        ("wall-clock", [row["seconds_share"] for row in rows], ACCENT, "-"),
    ):
        axes.plot(x, 100 * np.array(values), color=colour, linestyle=style, marker="o", label=name)
    axes.set_xticks(x, [f"{row['threshold']:g}" for row in rows])
    axes.set_ylim(bottom=0)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("threshold")
    axes.set_ylabel("percent of full depth")
    axes.legend(loc="lower left")
    return figure


@draw
def trade(fixed: Sequence[dict], rows: Sequence[dict]):
    """Loss against million MACs per token: fixed depths joined by a line, thresholds as squares."""
    figure, axes = _axes()
    for some, form, colour, name in ((fixed, "o-", SECOND, "fixed depth"), (rows, "s", ACCENT, "threshold")):
        cost, loss = [row["macs_per_token"] / 1e6 for row in some], [row["loss"] for row in some]
        axes.plot(cost, loss, form, color=colour, label=name)
    axes.set_xlabel("million MACs per token")
    axes.set_ylabel("loss, nats per token")
    axes.legend()
    return figure
