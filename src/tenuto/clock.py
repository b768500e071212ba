"""The wall clock of a device."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds by the clock, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
