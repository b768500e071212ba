"""Draws a sentence pair with each token coloured by its steps: python docs/picture.py CHECKPOINT docs/depth.svg"""

import sys
from html import escape
from pathlib import Path

from tenuto.data.logical_inference import RELATIONS, decode, protocol
from tenuto.data.pairs import PairDataset
from tenuto.evaluate import full_depth, load, predict
from tenuto.figures import depth_scale

HEIGHT, GAP, WIDTH = 30, 3, 860


def draw(checkpoint: str, path: str) -> None:
    """Takes the first rightly answered test pair of 9 operators that is not `#` and is 40 to 56 tokens long."""
    loaded = load(checkpoint)
    pairs = [one for one in protocol("length").test["9"] if one.relation != "#"]
    data = PairDataset(pairs, "classification")
    said = predict(loaded, pairs)
    number = next(
        n
        for n, one in enumerate(pairs)
        if 40 <= data.lengths[n] <= 56 and RELATIONS[said.relations[n]] == one.relation
    )
    tokens, steps = decode(data[number]["ids"]), said.depths[number].tolist()
    scale = depth_scale(full_depth(loaded.model))
    x, y, parts = 0, 24, []
    for place, (token, step) in enumerate(zip(tokens, steps, strict=True)):
        width = 18 + 8.2 * len(token)
        if x + width > WIDTH or token == "#SEP#":
            x, y = 0, y + HEIGHT + 6
        back, front, *_ = scale[step - 1]
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="4" fill="{back}"/>'
            f'<text x="{x + width / 2:.1f}" y="{y + 15}" fill="{front}">{escape(token)}</text>'
            f'<text x="{x + width / 2:.1f}" y="{y + 26}" fill="{front}" font-size="8.5">{step}</text>'
        )
        x += width + GAP
        if place + 1 == len(tokens):
            y += HEIGHT
    title = (
        f"answer {pairs[number].relation} (right); {sum(steps) / len(steps):.1f} of"
        f" {full_depth(loaded.model)} steps on average"
    )
    Path(path).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 6}" role="img"'
        ' font-family="ui-monospace,Menlo,Consolas,monospace" font-size="13.5" text-anchor="middle">'
        f'<rect width="{WIDTH}" height="{y + 6}" fill="#fcfcfa"/><text x="4" y="14" text-anchor="start"'
        f' fill="#646b76" font-family="system-ui,sans-serif" font-size="12">{escape(title)}</text>'
        + "".join(parts)
        + "</svg>\n"
    )


if __name__ == "__main__":
    draw(*sys.argv[1:3])
