"""Text-to-text checkpoints: answers of compositional tasks and translations, their quality, depth, MACs and seconds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from .data import parallel, sequences
from .data.sequences_batches import PAD, UNK, Ragged, padded
from .evaluate import Loaded, _now, full_depth, load

BATCH = 64


@dataclass
class Said:
    """What the model wrote for N sources, in their order, and what it cost.

    texts: decoded, without <eos>. finished: [N] bool, whether <eos> came within the limit. encoder_depths: one int
    array per source, the steps of each token; decoder_depths: the same of what was written, <eos> included. macs: of
    one pass over source and output, which is what a cached decoder computes for one beam. tokens: of both.
    seconds: of the search.
    """

    texts: list[str]
    finished: np.ndarray
    encoder_depths: list[np.ndarray]
    decoder_depths: list[np.ndarray]
    macs: int
    tokens: int
    seconds: float

    def costs(self) -> dict[str, float]:
        """Mean steps of a token on each side, MACs per token, seconds."""
        return {
            "encoder_depth": round(float(np.concatenate(self.encoder_depths).mean()), 3),
            "decoder_depth": round(float(np.concatenate(self.decoder_depths).mean()), 3),
            "macs_per_token": self.macs // self.tokens,
            "seconds": round(self.seconds, 2),
        }


@torch.inference_mode()
def write(
    loaded: Loaded,
    lines: Sequence[str],
    beams: int = 1,
    length_penalty: float = 1.0,
    max_length: int | None = None,
    progress: str | None = None,
    batch: int = BATCH,
    **knobs,
) -> Said:
    """The model's answer to each line, lines of like length together; `knobs` are the depth knobs of a forward.

    beams: 1 takes the likeliest token always. length_penalty: a beam's log-probability is divided by its length to this
    power. max_length: tokens written at most; 10 more than twice the source's when left out. ValueError if a line is
    empty or beams is below 1.
    """
    if beams < 1:
        raise ValueError(f"beams={beams} must be at least 1.")
    model, words = loaded.model, loaded.tokenizer
    sources = parallel.encode_lines(lines, words)
    if len(sources) and sources.lengths.min() < 2:
        raise ValueError(f"Line {int(sources.lengths.argmin()) + 1} is empty: there is nothing to read.")
    texts, finished = [""] * len(lines), np.zeros(len(lines), bool)
    depths: list[list] = [[None] * len(lines) for _ in range(2)]
    macs, tokens, seconds = 0, 0, 0.0
    order = np.argsort(sources.lengths, kind="stable")
    bar = Console(stderr=True)
    hidden = progress is None or not bar.is_terminal
    starts = range(0, len(lines), batch)
    for start in track(starts, progress or "", console=bar, transient=True, disable=hidden):
        places = order[start : start + batch]
        inputs = _inputs(sources.take(places), model.device)
        limit = 2 * inputs["input_ids"].shape[1] + 10 if max_length is None else max_length
        before = _now(model.device)
        out = model.generate(
            **inputs,
            num_beams=beams,
            length_penalty=length_penalty,
            do_sample=False,
            max_new_tokens=limit,
            **_ends(model.config),
            **knobs,
        )
        seconds += _now(model.device) - before
        written = [_until_end(row, model.config.eos_token_id) for row in out[:, 1:].tolist()]
        pass_over = model(**inputs, labels=padded(written, -100).to(model.device), **knobs)
        macs += pass_over.compute.total
        tokens += int(inputs["attention_mask"].sum()) + sum(map(len, written))
        for row, place in enumerate(places):
            ids = written[row]
            finished[place] = ids[-1] == model.config.eos_token_id
            # a model of bytes may write an end of line; an answer is one line
            texts[place] = words.decode(ids[: len(ids) - finished[place]]).replace("\n", " ")
            depths[0][place] = pass_over.depths[row, : sources.lengths[place]].cpu().numpy()
            depths[1][place] = pass_over.decoder_depths[row, : len(ids)].cpu().numpy()
    return Said(texts, finished, *depths, macs, tokens, seconds)


def _inputs(sources: Ragged, device: torch.device) -> dict[str, torch.Tensor]:
    rows = _rows(sources)
    inputs = {
        "input_ids": padded(rows, PAD),
        "attention_mask": padded([np.ones_like(row) for row in rows], 0),
    }
    return {name: value.to(device) for name, value in inputs.items()}


def _rows(sequences: Ragged) -> list[np.ndarray]:
    return [sequences[place] for place in range(len(sequences))]


def _ends(config) -> dict[str, int]:
    return {
        "decoder_start_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _until_end(ids: list[int], end: int) -> list[int]:
    """The ids up to the first `end`, which is kept."""
    return ids[: ids.index(end) + 1] if end in ids else ids


def split_compounds(line: str) -> str:
    """A line tokenised as 13a, hyphens between letters apart: `rich-text` becomes `rich ##AT##-##AT## text`."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", Tokenizer13a()(line))


def bleu(said: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """SacreBLEU of detokenised text, and tokenised BLEU after splitting compounds; each with its signature.

    The latter is what older papers report; they tokenise with Moses' script where this does as 13a.
    """
    metric, split = _metric(), _metric(tokenize="none", force=True)
    whole = metric.corpus_score(list(said), [list(references)])
    apart = split.corpus_score(*_apart(said, references))
    return {
        "bleu": round(whole.score, 2),
        "signature": str(metric.get_signature()),
        "split_bleu": round(apart.score, 2),
        "split_signature": f"{split.get_signature()} after 13a and ##AT##-##AT##",
    }


def _metric(**options):
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ImportError("BLEU needs the package sacrebleu: install tenuto[eval].") from None
    return BLEU(**options)


def _apart(said: Sequence[str], references: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    return list(map(split_compounds, said)), [list(map(split_compounds, references))]


def paired_bootstrap(
    first: Sequence[str],
    second: Sequence[str],
    references: Sequence[str],
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """BLEU of two outputs on the same references, and the difference (second - first) with its 95% interval.

    Sentences are drawn with replacement, the same ones for both (Koehn 2004). p: the share of the samples, two-sided,
    on the other side of zero. ValueError if the numbers of sentences differ.
    """
    if not len(first) == len(second) == len(references) > 0:
        raise ValueError(
            f"The outputs have {len(first)} and {len(second)} sentences, the references {len(references)}:"
            " they must be alike, and one at least."
        )
    metric = _metric(effective_order=False)
    counts = [_counts(metric, said, references) for said in (first, second)]
    draws = np.random.default_rng(seed)
    whole = [_score(metric, one.sum(0)) for one in counts]
    differences = []
    for _ in range(samples):
        chosen = draws.integers(len(references), size=len(references))
        differences.append(
            _score(metric, counts[1][chosen].sum(0)) - _score(metric, counts[0][chosen].sum(0))
        )
    beyond = min(np.mean(np.array(differences) <= 0), np.mean(np.array(differences) >= 0))
    return {
        "first": round(whole[0], 2),
        "second": round(whole[1], 2),
        "difference": round(whole[1] - whole[0], 2),
        "interval": np.percentile(differences, [2.5, 97.5]).round(2).tolist(),
        "p": round(min(1.0, 2 * float(beyond)), 4),
        "samples": samples,
        "signature": str(metric.get_signature()),
    }


def _counts(metric, said: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """[N, 2 x 4 + 2]: n-grams right, n-grams, and the lengths of output and reference, of each sentence."""
    rows = []
    for one, reference in zip(said, references, strict=True):
        score = metric.corpus_score([one], [[reference]])
        rows.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
    return np.array(rows)


def _score(metric, row: np.ndarray) -> float:
    order = metric.max_ngram_order
    right, all_of, (ours, theirs) = row[:order], row[order : 2 * order], row[2 * order :]
    return metric.compute_bleu(right.tolist(), all_of.tolist(), int(ours), int(theirs), "exp").score


def evaluate_pairs(
    checkpoint: str | Path,
    names: Sequence[str] = (),
    beams: int = 1,
    length_penalty: float = 1.0,
    limit: int | None = None,
    outputs: str | Path | None = None,
    **knobs,
) -> dict[str, Any]:
    """Figures of a text-to-text checkpoint by test set: `names`, or all of its task's but "validation".

    Compositional tasks: exact match (percent) beside the commonest training target (majority) and the source (copy) as
    answers, and by kind (`sequences.Example`); unanswerable: percent of targets with a word that training never showed
    (the positions of COGS' deepest sentences), which no answer of the model can equal. Translation: BLEU
    (see `bleu`) beside that of the source copied. Both: see `Said.costs`. limit: the first so many of a set. outputs:
    a folder to write what was said to, as NAME.txt.
    """
    loaded = load(checkpoint)
    translation = loaded.recipe.data.parallel is not None
    sets = test_pairs(loaded, names)
    figures: dict[str, Any] = {
        "full_depth": full_depth(loaded.model),
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "beams": beams,
        "length_penalty": length_penalty,
        "knobs": knobs,
        "sets": {},
    }
    constant = None if translation else commonest_target(loaded)
    for name, found in sets.items():
        chosen = found[:limit]
        sources, targets = [one[0] for one in chosen], [one[1] for one in chosen]
        most = None
        if not translation:
            # an answer longer than any right one is wrong, whatever follows
            most = max(len(target.split()) for target in targets) + 1
        said = write(loaded, sources, beams, length_penalty, most, f"set {name}", **knobs)
        if translation:
            row = {**bleu(said.texts, targets), "copy_bleu": bleu(sources, targets)["bleu"]}
        else:
            right = np.array([text == target for text, target in zip(said.texts, targets, strict=True)])
            right &= said.finished
            row = exact_match(right, [one[2] for one in chosen])
            unknown = [UNK in ids for ids in _rows(parallel.encode_lines(targets, loaded.tokenizer))]
            row["unanswerable"] = round(100 * float(np.mean(unknown)), 2)
            row["majority"] = round(100 * float(np.mean([target == constant for target in targets])), 2)
            row["copy"] = round(100 * float(np.mean(np.array(sources) == np.array(targets))), 2)
        figures["sets"][name] = {"examples": len(chosen), **row, **said.costs()}
        if outputs is not None:
            file = Path(outputs) / f"{name}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{text}\n" for text in said.texts), encoding="utf-8")
    return figures


def test_pairs(loaded: Loaded, names: Sequence[str] = ()) -> dict[str, list[tuple]]:
    """The test sets by name, pairs of texts; of compositional tasks (source, target, kind)."""
    data = loaded.recipe.data
    if data.sequences is not None:
        wanted = data.sequences
        known = [one for one in sequences.parts(wanted.task, wanted.split) if one != "train"]
    elif data.parallel is not None:
        known = ["validation", *data.parallel.test]
    else:
        raise ValueError(f"{loaded.folder} was trained on neither data.sequences nor data.parallel.")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{loaded.folder} has no set {unknown[0]!r}; it has {', '.join(known)}.")
    chosen = names or [name for name in known if name != "validation"]
    if not chosen:
        raise ValueError(f"{loaded.folder}: the recipe names no test set; --sets validation is one.")
    if data.sequences is not None:
        return {
            name: [
                (" ".join(one.source), " ".join(one.target), one.kind)
                for one in sequences.read(wanted.task, name, wanted.split, wanted.path)
            ]
            for name in chosen
        }
    corpora = {"validation": data.parallel.validation}
    corpora |= {name: [corpus] for name, corpus in data.parallel.test.items()}
    return {
        name: [pair for corpus in corpora[name] for pair in parallel.read_pairs(corpus, data.parallel.folder)]
        for name in chosen
    }


def commonest_target(loaded: Loaded) -> str:
    """The target that occurs most often in a compositional task's training part."""
    wanted = loaded.recipe.data.sequences
    train = sequences.read(wanted.task, "train", wanted.split, wanted.path)[: wanted.train]
    return Counter(" ".join(one.target) for one in train).most_common(1)[0][0]


def exact_match(right: np.ndarray, kinds: Sequence[str | int]) -> dict[str, Any]:
    """Percent right, of all and of each kind."""
    by_kind = {}
    for kind in sorted(set(kinds)):
        chosen = right[[one == kind for one in kinds]]
        by_kind[str(kind)] = {"examples": len(chosen), "exact": round(100 * float(chosen.mean()), 2)}
    return {"exact": round(100 * float(right.mean()), 2), "by_kind": by_kind}
