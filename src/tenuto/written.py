"""Text written by a language model, each token with the loops it ran."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Written:
    """Tokens as text, the loops of each, how many of them are the prompt; loops at most; seconds of generation."""

    tokens: list[str]
    steps: list[int]
    prompt: int
    full: int
    threshold: float
    seconds: float

    @property
    def mean_depth(self) -> float:
        """Loops per token, prompt included."""
        return sum(self.steps) / len(self.steps)


@torch.inference_mode()
def write(
    model, tokenizer, prompt: str, new_tokens: int = 80, threshold: float | None = None, seed: int | None = 0,
    temperature: float = 0.8,
) -> Written:  # fmt: skip
    """Goes on with a prompt; seed None: greedy. The depths are those of the decoding: one pass over the text gives
    the same.
    """
    from transformers import set_seed

    if model.config.policy == "fixed" and threshold is not None:
        raise ValueError("The model has a fixed depth: threshold has nothing to set.")
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = torch.tensor(
        [start + tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=model.device
    )
    knobs: dict[str, Any] = {} if threshold is None else {"threshold": threshold}
    sampling = {"do_sample": False}
    if seed is not None:
        set_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.95}
    before = time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, pad_token_id=tokenizer.pad_token_id,
        **sampling, **knobs,
    )  # fmt: skip
    seconds = time.perf_counter() - before
    steps = model.get_loop_depths(out, **knobs)[0].tolist()
    tokens = pieces(tokenizer, out[0].tolist()[len(start) :])
    used = model.config.halt_threshold if threshold is None else threshold
    return Written(tokens, steps[len(start):], ids.shape[1] - len(start), model.config.num_loops, used,
                   seconds)  # fmt: skip


def pieces(tokenizer, ids: list[int]) -> list[str]:
    """The text of each token; a character that several tokens make belongs to the last of them."""
    found, before = [], ""
    for end in range(1, len(ids) + 1):
        now = tokenizer.decode(ids[:end])
        whole = not now.endswith("\ufffd")
        found.append(now[len(before) :] if whole else "")
        before = now if whole else before
    return found


def coloured(written: Written):
    """The text for a terminal (rich), each token on the colour of its depth, the prompt underlined."""
    from rich.style import Style
    from rich.text import Text

    from .figures import depth_scale

    scale, text = depth_scale(written.full), Text()
    for place, (token, step) in enumerate(zip(written.tokens, written.steps, strict=True)):
        *_, paper, ink = scale[step - 1]
        text.append(token, Style(bgcolor=paper, color=ink, underline=place < written.prompt))
    return text


def legend(full: int):
    """The colours of the depths 1..full, for a terminal."""
    from rich.style import Style
    from rich.text import Text

    from .figures import depth_scale

    text = Text("loops ")
    for step, (*_, paper, ink) in enumerate(depth_scale(full), 1):
        text.append(f" {step} ", Style(bgcolor=paper, color=ink))
    return text
