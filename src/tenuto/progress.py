"""What training shows: one bar on a terminal, one plain line per log elsewhere; always on stderr."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback


class TrainingProgress(TrainerCallback):
    """Shows step, loss, mean depth and accuracy, instead of the trainer's own bars and dictionaries."""

    def __init__(self):
        self.console = Console(stderr=True)
        self.shown: dict[str, str] = {}
        self.bar: Progress | None = None
        self.tasks: dict[str, int] = {}
        self.start = time.time()

    def _task(self, name: str, total: int) -> int | None:
        if not self.console.is_terminal:
            return None
        if self.bar is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(
                *columns, TextColumn("{task.fields[note]}"), console=self.console, transient=True
            )
            self.bar.start()
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=total, note="")
        return self.tasks[name]

    def _close(self, name: str) -> None:
        if self.bar is not None and name in self.tasks:
            self.bar.remove_task(self.tasks.pop(name))
            if not self.tasks:
                self.bar.stop()
                self.bar = None

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:  # whatever happened, the terminal gets its cursor back
            self.bar.stop()

    def on_train_begin(self, args, state, control, **_):
        self._task("training", state.max_steps)

    def on_step_end(self, args, state, control, **_):
        task = self._task("training", state.max_steps)
        if task is not None:
            note = "  ".join(f"{name} {value}" for name, value in self.shown.items())
            self.bar.update(task, completed=state.global_step, note=note)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **_):
        task = self._task("validation", len(eval_dataloader))
        if task is not None:
            self.bar.advance(task)

    def on_log(self, args, state, control, logs=None, **_):
        kept = {
            "loss": ("loss", "{:.3f}"),
            "depth/mean": ("mean depth", "{:.2f}"),
            "eval_accuracy": ("accuracy", "{:.1%}"),
            "eval_exact": ("exact match", "{:.1%}"),
            "eval_loss": ("validation loss", "{:.3f}"),
        }
        new = {label: form.format(logs[key]) for key, (label, form) in kept.items() if key in logs}
        self.shown |= new
        if new:
            line = "  ".join(f"{label} {value}" for label, value in new.items())
            self.console.print(
                f"step {state.global_step}/{state.max_steps}  {line}  {time.time() - self.start:.0f} s",
                highlight=False,
                soft_wrap=True,
            )

    def on_evaluate(self, args, state, control, **_):
        self._close("validation")

    def on_train_end(self, args, state, control, **_):
        self._close("training")
