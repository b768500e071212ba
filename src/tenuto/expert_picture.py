"""Pictures of `expert_usage`: which token goes to which expert, one panel a router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from . import figures as draw

_PARTS = {"attention": "self-attention", "cross": "cross-attention", "feed_forward": "feed-forward"}
ROWS = 2  # tokens of each expert in a picture


def spoken(name: str) -> str:
    """encoder.2.feed_forward -> encoder, layer 2, feed-forward; of a model without a decoder, feed-forward."""
    words = [
        _PARTS.get(word, f"layer {word}" if word.isdigit() else word.replace("_", "-"))
        for word in name.split(".")
    ]
    return ", ".join(words)


def chosen_tokens(router: dict[str, Any]) -> list[str]:
    """The most specific tokens of each expert, expert by expert, each token once."""
    return list(dict.fromkeys(one["token"] for some in router["specific"].values() for one in some[:ROWS]))


def _panel(axes, router: dict[str, Any], colour: str, muted: str) -> None:
    """Squares: the share of a token's choices (row) that went to an expert (column); below, each expert's usage."""
    tokens, experts = chosen_tokens(router), len(router["usage"])
    shares = np.array([router["counts"][token] for token in tokens], float).reshape(len(tokens), experts)
    shares /= shares.sum(1, keepdims=True)
    for row, line in enumerate(shares):
        for expert, share in enumerate(line):
            if share:
                strength = round(float(share), 3)
                axes.bar(expert, 0.9, 0.9, bottom=row - 0.45, color=colour, alpha=strength, linewidth=0)
    axes.set_yticks(range(len(tokens)), [token.replace("$", r"\$") for token in tokens])
    axes.set_ylim(max(len(tokens), 1) - 0.5, -0.5)
    axes.set_xlim(-0.5, experts - 0.5)
    axes.set_xticks(
        range(experts), [f"{number}\n{100 * share:.0f}%" for number, share in enumerate(router["usage"])]
    )
    for label, share in zip(axes.get_xticklabels(), router["usage"], strict=True):
        label.set_color(muted if share else colour)
    axes.tick_params(labelsize=7.5, length=0)
    axes.grid(visible=False)
    axes.set_xlabel("expert, and its share of all choices", fontsize=8)


def _size(router: dict[str, Any]) -> tuple[float, float]:
    return 1.4 + 0.42 * len(router["usage"]), 0.9 + 0.19 * max(1, len(chosen_tokens(router)))


@draw.draw
def serving(router: dict[str, Any]):
    """One router's panel for the report."""
    figure, axes = draw._axes(*_size(router))
    _panel(axes, router, draw.ACCENT, draw.MUTED)
    return figure


def picture(usage: dict[str, Any], path: str | Path) -> None:
    """All routers of `expert_usage` in one file, .svg, .png or .pdf."""
    routers = usage["routers"]
    sizes = [_size(router) for router in routers.values()]
    # room for the titles
    width, heights = max(4.4, *(wide for wide, _ in sizes)), [high + 0.3 for _, high in sizes]
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    grid = figure.subplots(len(routers), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, router) in zip(grid, routers.items(), strict=True):
        _panel(axes, router, "#1f5a9e", "#646b76")
        axes.set_title(f"{spoken(name)}: entropy {router['entropy']:.2f} of 1", fontsize=9, loc="left")
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
