"""Text written by a language model, each token with the loops, or of a routed model the layers, that it ran."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Written:
    """Tokens as text, the steps (`unit`: loops or layers) of each, how many of them are the prompt; seconds.

    floor, full: steps at least and at most. threshold, or capacity, and selection: what the tokens were chosen by.
    """

    tokens: list[str]
    steps: list[int]
    prompt: int
    full: int
    threshold: float | None
    seconds: float
    unit: str = "loops"
    floor: int = 1
    capacity: float | None = None
    selection: str | None = None

    @property
    def mean_depth(self) -> float:
        """Steps per token, prompt included."""
        return sum(self.steps) / len(self.steps)

    @property
    def setting(self) -> str:
        """The knobs in words."""
        if self.threshold is not None:
            return f"threshold {self.threshold:g}"
        if self.selection == "dense":
            return "selection dense"
        rule = "" if self.selection == "threshold" else f", selection {self.selection}"
        return f"capacity {self.capacity:g}{rule}"


def knobs_in(model, knobs: dict[str, Any]) -> dict[str, Any]:
    """What of `Written` the knobs of a call set, the config's where the call says nothing; ValueError where they
    have nothing to set, or cannot write.
    """
    config, given = model.config, {name: value for name, value in knobs.items() if value is not None}
    if not hasattr(config, "routed_layers"):
        idle = [name for name in given if name != "threshold"]
        if idle:
            raise ValueError(f"The model has no routed layers: {idle[0]} has nothing to set.")
        if config.policy == "fixed" and given:
            raise ValueError("The model has a fixed depth: threshold has nothing to set.")
        return {"full": config.num_loops, "threshold": given.get("threshold", config.halt_threshold)}
    rule, full = given.get("selection", config.selection), config.num_hidden_layers
    if rule == "topk":
        raise ValueError(
            'selection="topk" looks at the whole text and cannot write one; choose threshold, running or dense.'
        )
    level = given.get("threshold")
    capacity = None if level is not None or rule == "dense" else given.get("capacity", config.capacity)
    floor = full - len(config.routed_layers)
    return {"full": full, "floor": floor, "unit": "layers", "threshold": level, "capacity": capacity,
            "selection": rule}  # fmt: skip


@torch.inference_mode()
def write(
    model, tokenizer, prompt: str, new_tokens: int = 80, threshold: float | None = None, seed: int | None = 0,
    temperature: float = 0.8, **routed,
) -> Written:  # fmt: skip
    """Goes on with a prompt; seed None: greedy. The depths are those of the decoding: one pass over the text gives
    the same. routed: capacity and selection of a routed model.
    """
    from transformers import set_seed

    knobs = {"threshold": threshold, **routed}
    settings = knobs_in(model, knobs)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if not start and not prompt:
        # as the evaluation harness does where a tokenizer has no beginning
        start = [tokenizer.eos_token_id]
    ids = torch.tensor(
        [start + tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=model.device
    )
    knobs = {name: value for name, value in knobs.items() if value is not None}
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
    return Written(tokens, steps[len(start) :], ids.shape[1] - len(start), seconds=seconds, **settings)


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

    scale, text = depth_scale(written.full - written.floor + 1), Text()
    for place, (token, step) in enumerate(zip(written.tokens, written.steps, strict=True)):
        *_, paper, ink = scale[step - written.floor]
        text.append(token, Style(bgcolor=paper, color=ink, underline=place < written.prompt))
    return text


def legend(full: int, unit: str = "loops", floor: int = 1):
    """The colours of the depths floor..full, for a terminal."""
    from rich.style import Style
    from rich.text import Text

    from .figures import depth_scale

    text = Text(f"{unit} ")
    for step, (*_, paper, ink) in enumerate(depth_scale(full - floor + 1), floor):
        text.append(f" {step} ", Style(bgcolor=paper, color=ink))
    return text
