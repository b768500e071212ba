"""What the surprise estimator in int8 costs in quality: trained SDT or STT language models by the causal rule, their
priors in float32 and in int8 (its speed: routed.py).

    python benchmarks/int8.py CHECKPOINT [CHECKPOINT ...] [--json FILE]

Held-out loss, realised capacity, and the share of the tokens in routed layers that are decided alike. Levels stay those
calibrated in float32.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

import torch

from tenuto.evaluate import load
from tenuto.language import corpus_of, measure, realised
from tenuto.models.surprise import Prior
from tenuto.results import write_result


def of_checkpoint(folder: str) -> dict:
    """Figures of one checkpoint, whose first pass is in float32."""
    loaded = load(folder)
    model, corpus = loaded.model.to("cpu"), corpus_of(loaded)
    if not any(isinstance(module, Prior) for module in model.modules()):
        raise SystemExit(f"{folder} has no priors; int8 is for SDT and STT.")
    float32 = measure(model, corpus)
    model.quantise_priors()
    int8 = measure(model, corpus)
    alike = (float32.executed == int8.executed)[:, model.config.routed_layers]
    figures = {"checkpoint": Path(folder).name, "alike": round(float(alike.mean()), 4)}
    for name, said in (("float32", float32), ("int8", int8)):
        figures[name] = {
            "loss": round(said.loss, 5),
            "realised": realised(model.config, said.mean_depth),
        }
    figures["loss_difference"] = round(int8.loss - float32.loss, 5)
    print(figures, file=sys.stderr, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.time()
    rows = [of_checkpoint(folder) for folder in options.checkpoints]
    if options.json:
        write_result(
            options.json, recipe=None, command=shlex.join(["python", *sys.argv]), seed=None,
            seconds=time.time() - start, figures={"rows": rows},
        )  # fmt: skip


if __name__ == "__main__":
    main()
