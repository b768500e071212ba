"""Perplexity of a causal language model on text files and folders of code."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from .forward import batches, check_knobs, cost_figures, prefix_token, run, wide
from .language import realised


def perplexity(
    model,
    tokenizer,
    paths: str | Path | Iterable[str | Path],
    length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    pattern: str = "*.py",
    **knobs,
) -> dict[str, Any]:
    """Nats per token, bits per byte and perplexity of text files or of a folder of code, each file a text of its own.

    length: tokens that the model reads at once, its config's max_position_embeddings when None. stride: tokens that a
    window scores, half of length when None; at that, a token is predicted from length / 2 tokens or more, or from all
    before it. The BOS token stands first. knobs: threshold, min_steps, max_steps, or of a routed model
    capacity, threshold, selection. depth_mean (loops, or layers run) and macs_per_token are of the tokens run, which
    overlapping windows run again. Errors as `read_texts`; ValueError for a stride longer than length, a knob that the
    model lacks, or when no file has text.
    """
    knobs = check_knobs(model, knobs)
    length = length or getattr(model.config, "max_position_embeddings", None)
    if length is None:
        raise ValueError(f"{type(model).__name__}'s config has no max_position_embeddings: give length.")
    stride = stride or max(1, length // 2)
    if not 1 <= stride <= length:
        raise ValueError(f"stride {stride} must be 1 to length {length}, or tokens would be left out.")
    first, texts, cut = prefix_token(tokenizer), read_texts(paths, pattern), []
    for text in texts.values():
        cut += windows(
            [first, *tokenizer.encode(text, add_special_tokens=False, verbose=False)], length, stride
        )
    if not cut:
        raise ValueError("The files hold no text.")
    cut.sort(key=lambda window: -len(window[0]))
    nats, costs, seconds, training = 0.0, [], 0.0, model.training
    model.eval()
    try:
        for batch in batches(cut, batch_size, "perplexity"):
            logits, spent, passed = run(model, [window[:-1] for window, _ in batch], knobs)
            costs, seconds = costs + spent, seconds + passed
            for (window, new), scores in zip(batch, logits, strict=True):
                wanted = torch.tensor(window[-new:], device=scores.device)
                said = wide(scores[len(window) - 1 - new : len(window) - 1])
                nats += float(F.cross_entropy(said, wanted, reduction="sum"))
    finally:
        model.train(training)
    tokens, size = sum(new for _, new in cut), sum(len(text.encode()) for text in texts.values())
    cost = cost_figures(costs)
    share = realised(model.config, cost["depth_mean"])
    return {
        "files": len(texts),
        "bytes": size,
        "tokens": tokens,
        "nats_per_token": nats / tokens,
        "bits_per_byte": nats / math.log(2) / size,
        "perplexity": math.exp(nats / tokens),
        "length": length,
        "stride": stride,
        "knobs": knobs,
        "tokens_run": cost["tokens"],
        "depth_mean": cost["depth_mean"],
        **({} if share is None else {"capacity_realised": share}),
        "macs_per_token": None if cost["macs"] is None else cost["macs"] // cost["tokens"],
        "seconds": round(seconds, 3),
    }


def read_texts(paths: str | Path | Iterable[str | Path], pattern: str = "*.py") -> dict[str, str]:
    """The texts of files by path: plain or .gz, UTF-8, bytes as they are; of a folder every file that fits pattern.

    FileNotFoundError when a path or a fitting file is missing, ValueError when a file is not UTF-8.
    """
    paths, texts = [paths] if isinstance(paths, str | Path) else list(paths), {}
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"There is no file or folder {path}.")
        files = sorted(file for file in path.rglob(pattern) if file.is_file()) if path.is_dir() else [path]
        if not files:
            raise FileNotFoundError(f"The folder {path} has no file {pattern}.")
        for file in files:
            data = file.read_bytes()
            try:
                texts[str(file)] = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file} is not UTF-8 text: {error.reason} at byte {error.start}."
                ) from error
    return texts


def windows(tokens: Sequence[int], length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Cuts a text (its prefix token, then N tokens) into windows that together predict each of the N tokens once.

    Yields (window, n): the model reads all tokens of a window but the last, at most `length`, and the last n are
    scored. All but the first window score `stride` tokens.
    """
    done, total = 0, len(tokens) - 1
    while done < total:
        new = min(stride if done else length, total - done)
        done += new
        yield list(tokens[max(0, done - length) : done + 1]), new
