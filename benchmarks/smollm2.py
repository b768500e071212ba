"""A pretrained model with routed layers at several capacities: perplexity of a text and BLiMP beside the dense model.

    python benchmarks/smollm2.py SOURCE --text FILE [--to sdt] [--pairs 10] [--json FILE]

SOURCE: a checkpoint of `tenuto train`, or a pretrained model (a folder or a .gguf file). That is measured as it is
("original") and converted in memory, its first token protected as in recipes/routed/smollm2.yaml, with the gates of the
architecture and, to tell what skipping costs from what scaling costs, without any. Levels are calibrated on the shipped
novels, never on FILE. Perplexity: the first 2,048 tokens of FILE in one window, the token --first (id 0 for SmolLM2)
before them. BLiMP: the first `pairs` of each paradigm, each sentence after the same token.
"""

import argparse
import math
import shlex
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from tenuto.convert import convert, read
from tenuto.data.text_documents import Source, read_documents
from tenuto.harness import evaluate_lm
from tenuto.results import write_result

WINDOW = 2048
SETTINGS = ({"selection": "dense"}, {"capacity": 0.9}, {"capacity": 0.75}, {"capacity": 0.5})


def open_source(source: str, to: str):
    """By name, models and how they are called; and the tokenizer."""
    folder = Path(source)
    if (folder / "recipe.yaml").is_file():
        from tenuto.evaluate import load

        loaded = load(folder)
        return {"adapted": (loaded.model, SETTINGS)}, loaded.tokenizer
    original, tokenizer = read(source)
    models = {"original": (original, SETTINGS[:1])}
    for name in ("converted", "converted, no gates"):
        model = convert(original, to)
        model.config.protected_tokens = 1
        if name != "converted":
            model.config.scale = "none"
        models[name] = (model, SETTINGS)
    return models, tokenizer


def calibration_text(tokenizer, tokens: int = 8192) -> torch.Tensor:
    """[R, 512] ids of the shipped novels' training part."""
    text, ids = Source(path="prose", blank_lines=True), []
    for document in read_documents(text, "train"):
        ids += tokenizer(document.text, add_special_tokens=False)["input_ids"]
        if len(ids) >= tokens:
            break
    return torch.tensor(ids[:tokens]).view(-1, 512)


@torch.inference_mode()
def perplexity(model, ids: torch.Tensor, **knobs) -> tuple[float, float]:
    """Perplexity of a row, and the share of tokens that the routed layers took."""
    out = model(ids, use_cache=False, **knobs)
    loss = F.cross_entropy(out.logits[0, :-1].float(), ids[0, 1:])
    routed = getattr(model.config, "routed_layers", None)
    share = 1.0 if routed is None else float(out.executed[..., routed].float().mean())
    return math.exp(float(loss)), share


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--to", default="sdt")
    parser.add_argument("--first", type=int, default=0, help="id of the token that stands before the text")
    parser.add_argument("--pairs", type=int, default=10, help="of each BLiMP paradigm; 0: no BLiMP")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    start = time.time()
    models, tokenizer = open_source(options.source, options.to)
    # BLiMP's sentences too begin with it; the tokenizer's own (1 of SmolLM2) begins a chat
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(options.first)
    text = calibration_text(tokenizer)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[options.first, *ids[: WINDOW - 1]]])
    rows = []
    for name, (model, settings) in models.items():
        routed = name != "original"
        if routed:
            model.calibrate(input_ids=text, batch=4)
        for knobs in settings:
            given = knobs if routed else {}
            value, share = perplexity(model, ids, **given)
            row = {"model": name, **given, "realised": round(share, 4), "perplexity": round(value, 3)}
            if options.pairs:
                asked = {"capacities": (given["capacity"],)} if "capacity" in given else given
                said = evaluate_lm(model, tokenizer, ["blimp"], limit=options.pairs, **asked)
                row["blimp"] = said["rows"][0]["groups"]["blimp"]["accuracy"]
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    figures = {"source": Path(options.source).name, "tokens": ids.shape[1], "rows": rows}
    if options.json:
        write_result(
            options.json, recipe=None, command=shlex.join(["python", *sys.argv]), seed=0,
            seconds=time.time() - start, figures=figures,
        )  # fmt: skip


if __name__ == "__main__":
    main()
