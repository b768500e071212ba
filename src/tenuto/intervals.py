"""Intervals over a few runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom; more seeds than that get the last, a little too wide
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student(values: Sequence[float]) -> dict[str, Any]:
    """Mean, spread (standard deviation) and the 95% interval of the mean by Student's t; None of a single value."""
    values = np.asarray(values, float)
    mean, count = float(values.mean()), len(values)
    spread, interval = None, None
    if count > 1:
        spread = float(values.std(ddof=1))
        half = STUDENT[min(count - 1, len(STUDENT)) - 1] * spread / count**0.5
        spread, interval = round(spread, 4), [round(mean - half, 4), round(mean + half, 4)]
    return {"mean": round(mean, 4), "spread": spread, "interval": interval}
