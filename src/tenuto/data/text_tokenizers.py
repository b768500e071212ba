"""Tokenizers of text: bytes, byte-level BPE, those of other models; documents as ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

SPECIAL = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = range(3)


def _alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, 0 to 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_VOCABULARY = {token: number for number, token in enumerate((*SPECIAL, *_alphabet()))}


def byte_tokenizer():
    """One token a byte: <pad>, <bos>, <eos> are 0, 1, 2 and byte b is 3 + b.

    It adds no <bos> by itself, so decode(encode(text)) == text; `encode_documents` and prompts add it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    core = Tokenizer(models.BPE(BYTE_VOCABULARY, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return _wrap(core)


def train_bpe(texts: Iterable[str], vocab_size: int, min_frequency: int = 2, single_digits: bool = True):
    """A byte-level BPE tokenizer trained on the texts; <pad>, <bos>, <eos> are 0, 1, 2; it adds none by itself.

    It has fewer than `vocab_size` tokens if no pair is left that occurs `min_frequency` times. single_digits: numbers
    are spelt digit by digit. ValueError if `vocab_size` has no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < len(BYTE_VOCABULARY):
        raise ValueError(f"vocab_size must be at least {len(BYTE_VOCABULARY)}, got {vocab_size}.")
    core = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    core.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return _wrap(core)


def _wrap(core):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(name_or_path: str):
    """The tokenizer "byte", or that of a folder, a GGUF file or a model as AutoTokenizer finds it; ValueError if none.

    One that has no padding pads with its end: rows are full, but a collator asks for it.
    """
    from transformers import AutoTokenizer

    if name_or_path == "byte":
        return byte_tokenizer()
    place, file = Path(name_or_path), {}
    if place.suffix == ".gguf":
        place, file = place.parent, {"gguf_file": place.name}
    try:
        words = AutoTokenizer.from_pretrained(place if file else name_or_path, **file)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no tokenizer {name_or_path}; say 'byte' or a folder with one.") from error
    if words.pad_token is None:
        words.pad_token = words.eos_token
    return words


def ends_of(tokenizer) -> tuple[int, int, int]:
    """Ids of padding, beginning and end; a tokenizer that lacks the first two uses its end for them."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("The tokenizer has no end-of-text token (eos_token); set one.")
    first, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    return end if pad is None else pad, end if first is None else first, end


def encode_documents(texts: Iterable[str], tokenizer, chunk: int = 1 << 20) -> Iterator[np.ndarray]:
    """Ids of each text, [tokens] int32, from <bos> to <eos>; a text that spells a special token is still text.

    `chunk` characters are tokenised at a time, by as many threads as TOKENIZERS_PARALLELISM allows.
    """
    _, first, end = ends_of(tokenizer)
    # bytes need no tokenizer, which is far slower
    plain = tokenizer.get_vocab() == BYTE_VOCABULARY

    def finish(batch):
        if plain:
            ids = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + len(SPECIAL) for text in batch]
        else:
            options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            ids = tokenizer(batch, return_attention_mask=False, **options)["input_ids"]
        for one in ids:
            yield np.concatenate([[first], one, [end]]).astype(np.int32)

    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= chunk:
            yield from finish(batch)
            batch, size = [], 0
    if batch:
        yield from finish(batch)
