"""Text to token ids and back: bytes, text8's 35 symbols, or any Hugging Face tokenizer.

The mask id is the tokenizer's own mask token where it has one (BERT: 103), else a new last id (GPT-2: 50257, so
V = 50258); it never falls together with padding.
"""

import hashlib
import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdlm_scale.config import TokenizerConfig
from mdlm_scale.errors import ConfigError, raise_if_any
from mdlm_scale.log import log

FILES = ["*.json", "*.txt", "*.model", "*.jinja"]  # of a tokenizer on the hub
BARE = "is a folder without a Hugging Face tokenizer"
Ids = NDArray[Any]  # token ids, of some unsigned type


@dataclass(frozen=True)
class Tokenizer:
    name: str
    vocab_size: int  # V, the mask included
    mask_id: int
    pad_id: int  # fills the end of a row; never scored
    bos_id: int
    eos_id: int
    encode_batch: Callable[[list[str]], list[Ids]]  # without special tokens
    decode: Callable[[list[int]], str]  # special tokens are shown, so that nothing of a sample is hidden
    fingerprint: str  # equal for equal vocabularies

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.encode_batch([text])[0]]


def load(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of the run; a ConfigError if it cannot be had or is not the one the recipe expects."""
    if config.name == "bytes":
        tokenizer = _bytes()
    elif config.name == "text8":
        tokenizer = _text8()
    else:
        tokenizer = _hugging_face(config.name)
    found = []
    if config.vocab_size not in (None, tokenizer.vocab_size):
        found.append(
            f"tokenizer.vocab_size={config.vocab_size}, but '{config.name}' has {tokenizer.vocab_size} entries, "
            f"the mask included. Give that size, or the tokenizer of the recipe."
        )
    mask_id = tokenizer.mask_id if config.mask_id is None else config.mask_id
    if not 0 <= mask_id < tokenizer.vocab_size:
        found.append(f"tokenizer.mask_id={mask_id} is outside the vocabulary, 0 .. {tokenizer.vocab_size - 1}.")
    elif mask_id != tokenizer.mask_id:
        found.append(f"tokenizer.mask_id={mask_id}, but the mask token of '{config.name}' is {tokenizer.mask_id}.")
    raise_if_any(found)
    return tokenizer


def _bytes() -> Tokenizer:
    """One token a byte of UTF-8, then four specials."""
    specials = ("[BOS]", "[EOS]", "[PAD]", "[MASK]")

    def decode(ids: list[int]) -> str:
        parts = [bytes([i]) if i < 256 else specials[i - 256].encode() for i in ids]
        return b"".join(parts).decode("utf-8", errors="replace")

    return Tokenizer(
        name="bytes", vocab_size=260, mask_id=259, pad_id=258, bos_id=256, eos_id=257,
        encode_batch=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
        decode=decode, fingerprint=_hash(("bytes", *specials)),
    )  # fmt: skip


def _text8() -> Tokenizer:
    """The 27 characters of text8 after eight specials, in the order of the released code."""
    specials = ("[CLS]", "[SEP]", "[BOS]", "[EOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]")
    symbols = [*specials, *string.ascii_lowercase, " "]
    index = {symbol: i for i, symbol in enumerate(symbols)}
    id_of_byte = np.array([index.get(chr(byte), index["[UNK]"]) for byte in range(256)], np.uint8)
    return Tokenizer(
        name="text8", vocab_size=len(symbols), mask_id=index["[MASK]"], pad_id=index["[PAD]"],
        bos_id=index["[BOS]"], eos_id=index["[EOS]"],
        encode_batch=lambda texts: [id_of_byte[np.frombuffer(t.encode("latin-1", "replace"), np.uint8)] for t in texts],
        decode=lambda ids: "".join(symbols[i] for i in ids), fingerprint=_hash(symbols),
    )  # fmt: skip


def _hugging_face(name: str) -> Tokenizer:
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # it warns of rows longer than a model we do not use
    load_from = partial(AutoTokenizer.from_pretrained, trust_remote_code=False)  # nor is there a question about it
    try:
        try:
            theirs = load_from(name, local_files_only=True)  # the network is asked last
        except (OSError, ValueError):
            if Path(name).is_dir():
                raise
            log.info(f"fetching tokenizer '{name}' from the Hugging Face hub")
            # asked for by its files: without a network this fails at once, where the class would retry for a minute
            theirs = load_from(snapshot_download(name, allow_patterns=FILES))
    except (OSError, ValueError, KeyError) as error:
        kind = BARE if Path(name).is_dir() else "is no folder here and could not be fetched"
        raise ConfigError(
            f"tokenizer.name='{name}' {kind} ({str(error).splitlines()[0]}). Give the path of a folder that holds "
            f"the tokenizer (tokenizer.json, or vocabulary files and tokenizer_config.json): tokenizer.name=FOLDER."
        ) from error
    vocabulary: dict[str, int] = theirs.get_vocab()
    if set(vocabulary.values()) <= set(theirs.all_special_ids):
        raise ConfigError(f"tokenizer.name='{name}' {BARE}: no vocabulary.")
    size = max(vocabulary.values()) + 1
    mask_id = theirs.mask_token_id if theirs.mask_token_id is not None else size
    eos_id = _first(theirs.eos_token_id, theirs.sep_token_id)
    bos_id = _first(theirs.bos_token_id, theirs.cls_token_id, eos_id)
    if eos_id is None or bos_id is None:
        raise ConfigError(f"tokenizer.name='{name}' has no end-of-text token (eos or sep), which ends a document.")
    mask_text = str(theirs.mask_token or "[MASK]")

    def decode(ids: list[int]) -> str:
        runs = [(is_theirs, list(run)) for is_theirs, run in groupby(ids, lambda i: i < size)]
        # our own mask token is unknown to their decoder
        return "".join(str(theirs.decode(run)) if is_theirs else mask_text * len(run) for is_theirs, run in runs)

    return Tokenizer(
        name=name,
        vocab_size=max(size, mask_id + 1),
        mask_id=mask_id,
        pad_id=_first(theirs.pad_token_id if theirs.pad_token_id != mask_id else None, eos_id),
        bos_id=bos_id,
        eos_id=eos_id,
        encode_batch=_batch_encoder(theirs),
        decode=decode,
        fingerprint=_hash([sorted(vocabulary.items(), key=lambda item: item[1]), mask_id]),
    )


def _batch_encoder(theirs: Any) -> Callable[[list[str]], list[Ids]]:
    """Text that happens to spell a special token is text: a clean row must never hold the mask."""
    if theirs.is_fast:
        backend = theirs.backend_tokenizer  # asked directly: its Python wrapper takes longer than the tokenising
        backend.encode_special_tokens = True
        return lambda texts: [
            np.array(found.ids, np.uint32) for found in backend.encode_batch_fast(texts, add_special_tokens=False)
        ]
    return lambda texts: [
        np.array(theirs.encode(text, add_special_tokens=False, split_special_tokens=True), np.uint32) for text in texts
    ]


def _first(*ids: int | None) -> Any:
    return next((i for i in ids if i is not None), None)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
