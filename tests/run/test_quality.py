"""The figures of samples, against small cases done by hand; the judge's, against its own loss."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from mdlm_scale.config import TokenizerConfig
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.run import quality

BYTES = tokenizer_module.load(TokenizerConfig(name="bytes"))
CONTEXT = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 of random weights over bytes, as a user's would come."""
    folder = tmp_path_factory.mktemp("judge")
    vocabulary = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"])}
    theirs = Tokenizer(models.BPE(vocabulary, []))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=theirs, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(vocabulary), n_positions=CONTEXT, n_embd=16, n_layer=1, n_head=2, initializer_range=1.0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge(folder: Path) -> quality.Judge:
    return quality.load_judge(str(folder))


def test_variety() -> None:
    found = quality.report([[5, 5, 5, 5, 5, 5], [1, 2, 1, 2, 3, 4]])
    halves = -(2 * (2 / 6) * math.log(2 / 6) + 2 * (1 / 6) * math.log(1 / 6))
    assert found["entropy"] == pytest.approx((0 + halves) / 2)
    assert found["distinct_1"] == 5 / 12
    assert found["distinct_2"] == 5 / 10  # 55; 12 21 23 34
    assert found["distinct_3"] == 5 / 8  # 555; 121 212 123 234
    assert found["repetition_4"] == pytest.approx((2 / 3 + 0) / 2)
    assert "generative_ppl" not in found


def test_a_sample_too_short_for_n_grams_has_none() -> None:
    assert quality.report([[7]]) == {
        "entropy": 0.0, "distinct_1": 1.0, "distinct_2": None, "distinct_3": None, "repetition_4": None
    }  # fmt: skip


def test_generative_perplexity_is_the_judges_own_loss(judge: quality.Judge) -> None:
    """Two texts: one fits the judge, one takes two pieces; frame tokens are not read, and a text of one token counts
    nothing."""
    model, theirs = judge
    samples = [[BYTES.bos_id, *b"abc", BYTES.eos_id, *b"de", BYTES.pad_id], [*b"0123456789"], [*b"x"]]
    with torch.inference_mode():
        found = quality.report(samples, BYTES, judge)
    nats, count = 0.0, 0
    for piece in ("abc\nde", "01234567", "89"):
        ids = torch.tensor([theirs(piece)["input_ids"]])
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss  # mean over all tokens but the first
        nats, count = nats + float(loss) * (ids.shape[1] - 1), count + ids.shape[1] - 1
    assert count == 5 + 7 + 1
    assert found["judge_tokens"] == count
    assert found["entropy"] > 0  # always beside it
    assert found["generative_ppl"] == pytest.approx(math.exp(nats / count), rel=1e-5)  # their loss is float32


def test_a_judge_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(
        quality.ConfigError, match=r"cannot be loaded \(.*\)\. It must be a name on the Hugging Face hub"
    ):
        quality.load_judge(str(tmp_path))


def test_a_judge_that_cannot_read(folder: Path, tmp_path: Path) -> None:
    """Its tokenizer is not there, or is another model's."""
    mute, other = tmp_path / "mute", tmp_path / "other"
    shutil.copytree(folder, mute, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(quality.ConfigError, match="cannot be loaded"):
        quality.load_judge(str(mute))
    shutil.copytree(folder, other)
    GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_layer=1, n_head=2)).save_pretrained(other)
    with pytest.raises(quality.ConfigError, match="its tokenizer has 257 entries, the model 100"):
        quality.load_judge(str(other))


def test_code_of_a_judge_is_not_run(folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(folder, theirs)
    (theirs / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (theirs / "config.json").write_text(
        json.dumps(
            json.loads((theirs / "config.json").read_text())
            | {"model_type": "theirs", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
        )
    )
    with pytest.raises(quality.ConfigError, match="cannot be loaded"):
        quality.load_judge(str(theirs))
    assert not (tmp_path / "ran").exists()
