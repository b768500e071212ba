"""BLiMP and MMLU, as shipped: their pairs and questions, and tasks of lm-evaluation-harness made of them.

Reading needs no extra; `build_tasks` needs `tenuto[eval]`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task

DATA = Path(__file__).parent / "data"


@cache
def blimp() -> dict[str, list[dict]]:
    """The 1,000 minimal pairs of each of BLiMP's 67 paradigms; ValueError when the file is not the recorded one."""
    return _by("UID", _read("blimp/blimp.jsonl.gz"))


@cache
def mmlu(split: str = "test") -> dict[str, list[dict]]:
    """The questions of each of MMLU's 57 subjects: split dev (5 each), val or test; ValueError as `blimp`."""
    if split not in ("dev", "val", "test"):
        raise ValueError(f"MMLU has no split {split!r}; it has dev, val, test.")
    return _by("subject", _read(f"mmlu/mmlu_{split}.jsonl.gz"))


def mmlu_categories() -> dict[str, list[str]]:
    """The subjects of MMLU's categories stem, humanities, social_sciences and other."""
    return _yaml("mmlu_categories")


@cache
def _read(name: str) -> list[dict]:
    folder, file = (DATA / "files" / name).parent, (DATA / "files" / name).name
    recorded = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    packed = (folder / file).read_bytes()
    found = hashlib.sha256(packed).hexdigest()
    if found != recorded.get(file):
        raise ValueError(
            f"{name} is not the published file: its SHA-256 is {found}, but SHA256SUMS records"
            f" {recorded.get(file, 'nothing')}; restore the file"
        )
    return [json.loads(line) for line in gzip.decompress(packed).decode().split("\n") if line]


@cache
def _yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load((DATA / "tasks" / f"{name}.yaml").read_text())


def _by(key: str, rows: list[dict]) -> dict[str, list[dict]]:
    parts = defaultdict(list)
    for row in rows:
        parts[row[key]].append(row)
    return dict(parts)


def build_tasks(
    names: Sequence[str], num_fewshot: int | None = None, subjects: Sequence[str] = ()
) -> tuple[dict[str, Task], dict[str, Group]]:
    """Tasks and groups of lm-eval, as its `evaluate(lm, {"tasks": ..., "groups": ...})` takes them.

    names: `blimp` (mean of 67 paradigms), `blimp_{paradigm}`, `mmlu` (57 subjects, mean over all questions),
    `mmlu_{category}`, `mmlu_{subject}`. num_fewshot: examples in MMLU's prompts, 0 to 5, 5 when None; BLiMP has none.
    subjects: the subjects and categories that `mmlu` is narrowed to. ValueError when a name is unknown.
    """
    need_lm_eval()
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    if num_fewshot is not None and not 0 <= num_fewshot <= 5:
        raise ValueError(f"num_fewshot must be 0 to 5, MMLU's examples of a subject, not {num_fewshot}.")
    members = _members(names, subjects)
    tasks = {name: _task(name, num_fewshot) for group in members.values() for name in group}
    groups = {}
    for name, parts in members.items():
        if name in parts:
            continue
        # paradigms weigh alike; a subject weighs as many questions as it has
        mean = AggMetricConfig(metric="acc", weight_by_size=name != "blimp")
        groups[name] = Group(name, aggregate_metric_list=[mean])
        for part in parts:
            groups[name].add(tasks[part])
    return tasks, groups


def _members(names: Sequence[str], subjects: Sequence[str]) -> dict[str, list[str]]:
    """The tasks of each name: of a group its members, of a task itself."""
    if isinstance(names, str):
        raise ValueError(f"Tasks are a list of names: [{names!r}], not {names!r}.")
    categories = mmlu_categories()
    every = [subject for group in categories.values() for subject in group]
    chosen = [one for name in subjects for one in categories.get(name, [name])] or every
    unknown = [name for name in chosen if name not in every]
    if unknown:
        raise ValueError(
            f"MMLU has no subject or category {unknown[0]}: categories are {', '.join(categories)}; subjects are"
            f" {', '.join(sorted(every))}."
        )
    known = {"blimp": [f"blimp_{paradigm}" for paradigm in blimp()]}
    known |= {"mmlu": [f"mmlu_{one}" for one in dict.fromkeys(chosen)]}
    known |= {f"mmlu_{name}": [f"mmlu_{one}" for one in group] for name, group in categories.items()}
    known |= {name: [name] for name in (*known["blimp"], *(f"mmlu_{one}" for one in every))}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(
            f"There is no task {', '.join(unknown[:1]) or 'named'}: name blimp, blimp_(paradigm), mmlu,"
            f" mmlu_(subject) or mmlu_(category), categories being {', '.join(categories)}."
        )
    if subjects and "mmlu" not in names:
        raise ValueError("subjects narrow the task mmlu, which is not among the tasks.")
    return {name: known[name] for name in names}


def _task(name: str, num_fewshot: int | None) -> Task:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from pyarrow import Table

    family, _, part = name.partition("_")
    config = {**_yaml(family), "task": name}
    if family == "blimp":
        rows = {"test": blimp()[part]}
        config["process_results"] = _prefers_good
    else:
        rows = {split: mmlu(split)[part] for split in ("dev", "test")}
        about = part.replace("_", " ")
        config["description"] = (
            f"The following are multiple choice questions (with answers) about {about}.\n\n"
        )
        if num_fewshot is not None:
            config["num_fewshot"] = num_fewshot

    class ShippedTask(ConfigurableTask):
        def download(self, dataset_kwargs=None, **_):
            # from memory: lm-eval's json loader would write a copy of every task into the user's cache.
            # A fingerprint is given, for to compute one takes longer than all else
            self.dataset = {
                split: Dataset(Table.from_pylist(found), fingerprint=f"{name}-{split}")
                for split, found in rows.items()
            }

        def fewshot_docs(self):
            return self.dataset.get("dev")

    return ShippedTask(config=config)


def _prefers_good(doc: dict, results: list[tuple[float, bool]]) -> dict[str, float]:
    # lm-eval's argmax would call a tie, and a model that returns NaN, right
    good, bad = (score for score, _ in results)
    return {"acc": float(good > bad)}


def need_lm_eval() -> None:
    """ImportError with one sentence where lm-evaluation-harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ImportError("Tasks need lm-evaluation-harness: pip install 'tenuto[eval]'.") from error
