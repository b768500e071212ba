"""What cache_slots="last" costs a looped language model: loss and memory of decoding beside the exact cache.

    python benchmarks/slots.py CHECKPOINT [--rows N] [--json FILE]

Held-out rows of the checkpoint's recipe, read token by token with a cache: after a context of 64 tokens, every next
token's loss. "loop" keeps a slot for each layer and loop and gives what one pass over the text gives; "last" keeps one
for each layer, overwritten by the last loop. At full depth, and at the checkpoint's own threshold.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from tenuto.evaluate import load
from tenuto.language import corpus_of
from tenuto.results import write_result

CONTEXT = 64


@torch.inference_mode()
def decode(model, ids: torch.Tensor, **knobs) -> tuple[float, float, int]:
    """Mean loss of ids[:, CONTEXT+1:], mean loops, bytes of keys and values at the end."""
    cache = DynamicCache(config=model.config)
    out = model(ids[:, :CONTEXT], cache=cache, **knobs)
    losses, depths = [], []
    for place in range(CONTEXT, ids.shape[1]):
        losses.append(F.cross_entropy(out.logits[:, -1], ids[:, place]))
        out = model(ids[:, place : place + 1], cache=cache, **knobs)
        depths.append(out.depths.float().mean())
    held = sum(
        part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values)
    )
    return float(torch.stack(losses[1:]).mean()), float(torch.stack(depths).mean()), held


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.time()
    loaded = load(options.checkpoint)
    model, corpus = loaded.model, corpus_of(loaded, (), options.rows)
    # a cache does not know documents: rows that hold one from beginning to end
    alone = torch.tensor([len(set(row.tolist())) == 1 for row in corpus.document])
    ids = corpus.inputs["input_ids"][alone]
    figures: dict = {"rows": len(ids), "tokens": ids.shape[1]}
    full = {"min_steps": model.config.num_loops} if model.config.policy != "fixed" else {}
    for setting, knobs in (("full depth", full), ("own threshold", {})):
        for slots in ("loop", "last"):
            model.config.cache_slots = slots
            model.config.derive()
            loss, depth, held = decode(model, ids, **knobs)
            figures[f"{setting}, {slots}"] = {
                "loss": round(loss, 4),
                "loops": round(depth, 3),
                "kv_bytes_per_token": round(held / ids.numel(), 1),
            }
            print(setting, slots, figures[f"{setting}, {slots}"], file=sys.stderr, flush=True)
    if options.json:
        write_result(
            options.json, recipe=None, command=shlex.join(["python", *sys.argv]), seed=0,
            seconds=time.time() - start, figures=figures,
        )  # fmt: skip


if __name__ == "__main__":
    main()
