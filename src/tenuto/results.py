"""Result files: one JSON per measured run, with what is needed to run it again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def commit() -> str:
    """The commit of the source in use, "-dirty" appended when it was changed; "unknown" outside a checkout."""
    run = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "check": True}
    try:
        name = subprocess.run(["git", "rev-parse", "HEAD"], **run).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "."], **run
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("-dirty" if changed else "")


def hardware() -> dict[str, Any]:
    """Processor, threads in use, accelerator and library versions."""
    import torch

    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }


def write_result(
    path: Path,
    *,
    recipe: dict | str | None,
    command: str,
    seed: int | None,
    seconds: float,
    figures: dict[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """Writes a result file whole or not at all, and returns what it holds."""
    result = {
        "recipe": recipe,
        "command": command,
        "seed": seed,
        "commit": commit(),
        "hardware": hardware(),
        "seconds": round(seconds, 1),
        "figures": figures,
        **more,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.replace(path)
    return result
