"""Tokenizers: round trips, where the mask id comes from, and what the recipe expects.

Hugging Face tokenizers are made here, small but of the real kinds: one as GPT-2's (bytes, a single special token, no
mask) and one as BERT's (a mask in the middle of the vocabulary).
"""

import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mdlm_scale.config import TokenizerConfig
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.errors import ConfigError

TEXT = "The cat — größer als 猫 — sat\ton the mat.\n"
END = "<|endoftext|>"
BERT_VOCABULARY = ["[PAD]", "the", "cat", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sat", "on", "mat", "##s"]
BERT_SPECIALS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "mask", "unk")}


def load(name: Path | str, **expected: int) -> tokenizer_module.Tokenizer:
    return tokenizer_module.load(TokenizerConfig(name=str(name), **expected))


@pytest.fixture(scope="module")
def like_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 bytes, one merge, and the end of text as the last id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "at", END])}
    theirs = Tokenizer(models.BPE(vocabulary, [("a", "t")]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("like_gpt2")
    PreTrainedTokenizerFast(tokenizer_object=theirs, bos_token=END, eos_token=END, unk_token=END).save_pretrained(
        folder
    )
    return folder


def bert(folder: Path, specials: dict[str, str], vocabulary: list[str] = BERT_VOCABULARY) -> Path:
    theirs = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    theirs.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs.decoder = decoders.WordPiece()
    ends = [(token, vocabulary.index(token)) for token in ("[CLS]", "[SEP]")]
    theirs.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    PreTrainedTokenizerFast(tokenizer_object=theirs, **specials).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def like_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("like_bert"), BERT_SPECIALS)


def test_bytes_give_the_text_back() -> None:
    tokenizer = load("bytes")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_bytes_are_256_and_four_specials() -> None:
    tokenizer = load("bytes")
    specials = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id]
    assert (tokenizer.vocab_size, specials) == (260, [256, 257, 258, 259])


def test_bytes_show_specials_and_broken_characters() -> None:
    assert load("bytes").decode([256, 0xC3, 259, 97]) == "[BOS]\ufffd[MASK]a"


def test_text8_symbols_are_in_the_order_of_the_released_code() -> None:
    specials = ["[CLS]", "[SEP]", "[BOS]", "[EOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]"]
    tokenizer = load("text8")
    assert [tokenizer.decode([i]) for i in range(35)] == [*specials, *"abcdefghijklmnopqrstuvwxyz "]


def test_text8_ids() -> None:
    tokenizer = load("text8")
    ids = (tokenizer.vocab_size, tokenizer.mask_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
    assert ids == (35, 4, 5, 2, 3)


def test_text8_gives_the_text_back() -> None:
    tokenizer = load("text8")
    assert tokenizer.decode(tokenizer.encode("a zebra")) == "a zebra"


def test_text8_does_not_know_capitals() -> None:
    assert load("text8").encode("aB ") == [8, 7, 34]


def test_gpt2_gets_a_mask_as_new_last_id(like_gpt2: Path) -> None:
    tokenizer = load(like_gpt2)
    assert (tokenizer.mask_id, tokenizer.vocab_size) == (258, 259)


def test_gpt2_pads_and_begins_with_its_only_special(like_gpt2: Path) -> None:
    tokenizer = load(like_gpt2)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (257, 257, 257)


def test_gpt2_gives_the_text_back(like_gpt2: Path) -> None:
    tokenizer = load(like_gpt2)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_gpt2_decodes_our_mask(like_gpt2: Path) -> None:
    tokenizer = load(like_gpt2)
    ids = [*tokenizer.encode("the "), tokenizer.mask_id, tokenizer.mask_id, *tokenizer.encode(" sat"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == f"the [MASK][MASK] sat{END}"


def test_bert_keeps_its_own_mask(like_bert: Path) -> None:
    tokenizer = load(like_bert)
    assert (tokenizer.mask_id, tokenizer.vocab_size) == (6, 11)


def test_bert_begins_with_cls_and_ends_with_sep(like_bert: Path) -> None:
    tokenizer = load(like_bert)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 4, 5)


def test_bert_encodes_without_specials(like_bert: Path) -> None:
    assert load(like_bert).encode("the cats sat") == [1, 2, 10, 7]


def test_bert_decodes_its_mask(like_bert: Path) -> None:
    assert load(like_bert).decode([1, 6, 7]) == "the [MASK] sat"


def test_text_that_spells_the_mask_is_text(like_bert: Path) -> None:
    """The mask is no answer: a clean row that held its id would have an infinite loss."""
    tokenizer = load(like_bert)
    assert tokenizer.mask_id not in tokenizer.encode("the [MASK] sat")


def test_padding_is_never_the_mask(tmp_path: Path) -> None:
    tokenizer = load(bert(tmp_path, BERT_SPECIALS | {"pad_token": "[MASK]"}))
    assert (tokenizer.pad_id, tokenizer.mask_id) == (5, 6)


@pytest.mark.parametrize(
    ("expected", "complaints"),
    [
        ({"vocab_size": 30522}, ["tokenizer.vocab_size=30522, but 'bytes' has 260"]),
        ({"mask_id": 4}, ["tokenizer.mask_id=4, but the mask token of 'bytes' is 259"]),
        ({"mask_id": 260}, ["tokenizer.mask_id=260 is outside the vocabulary, 0 .. 259"]),
        ({"mask_id": -1}, ["tokenizer.mask_id=-1 is outside the vocabulary"]),
        ({"vocab_size": 50258, "mask_id": 50257}, ["2 faults", "vocab_size=50258", "mask_id=50257"]),
    ],
)
def test_another_tokenizer_than_expected_is_refused(expected: dict[str, int], complaints: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("bytes", **expected)
    assert all(complaint in str(caught.value) for complaint in complaints)


def test_expected_tokenizer_is_accepted(like_bert: Path) -> None:
    assert load(like_bert, vocab_size=11, mask_id=6).mask_id == 6


def test_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no end-of-text token"):
        load(bert(tmp_path, {"unk_token": "[UNK]"}))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": "{broken", "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}'},
        {"config.json": '{"model_type": "gpt2"}'},
    ],
    ids=["empty", "broken", "a model's"],
)
def test_folder_without_a_tokenizer_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match="is a folder without a Hugging Face tokenizer"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "nobody/nothing", "no/such/folder"])
def test_name_that_cannot_be_fetched_asks_for_a_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"could not be fetched .*tokenizer\.name=FOLDER"):
        load(name)


def test_name_that_cannot_be_fetched_fails_at_once_when_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds after imports; ten seconds allow for a busy machine, and the retries of a download wait 23."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    start = time.perf_counter()
    with pytest.raises(ConfigError):
        load("nobody/nothing")
    assert time.perf_counter() - start < 10


def test_fingerprints_tell_vocabularies_apart(like_gpt2: Path, like_bert: Path, tmp_path: Path) -> None:
    other = [*BERT_VOCABULARY[:-2], "##s", "mat"]  # the same entries, two of them exchanged
    changed = bert(tmp_path, BERT_SPECIALS, other)
    names = ("bytes", "text8", like_gpt2, like_bert, changed)
    assert len({load(name).fingerprint for name in names}) == len(names)


def test_fingerprint_does_not_depend_on_the_place(like_bert: Path, tmp_path: Path) -> None:
    copy = bert(tmp_path, BERT_SPECIALS)
    assert load(copy).fingerprint == load(like_bert).fingerprint
