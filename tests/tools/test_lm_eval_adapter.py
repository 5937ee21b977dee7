"""An export under lm-evaluation-harness, on a task of its own; skipped where the harness is not installed."""

import json
from pathlib import Path
from typing import Any

import convert_ckpt
import pytest
import torch
from conftest import Train
from torch import Tensor

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval (lm-evaluation-harness) is not installed")
BOS, MASK = 256, 259


@pytest.fixture
def adapter(train_run: Train, tmp_path: Path) -> Any:
    """Over a small model in float64, far from its zero initial weights."""
    from lm_eval_adapter import MaskedDiffusion

    assert train_run("train.num_steps=3", "optimizer.lr=0.1", "optimizer.warmup_steps=1", "ema.decay=0.1") == 0
    assert convert_ckpt.main([str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    return MaskedDiffusion(str(tmp_path / "hf"), draws=4096, batch_size=512)


def log_probs(adapter: Any, *z: int) -> Tensor:
    """At each position, without the mask."""
    with torch.no_grad():
        logits_LV = adapter.model(torch.tensor([z])).logits[0].double()
    return logits_LV[:, :MASK].log_softmax(-1)


def asked(adapter: Any, kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return getattr(adapter, kind)([Instance(kind, {}, arguments, 0)])[0]


def test_one_token_is_the_networks_own_answer(adapter: Any) -> None:
    found, is_greedy = asked(adapter, "loglikelihood", "ab", "c")
    exact_V = log_probs(adapter, BOS, *b"ab", MASK)[3]
    assert found == pytest.approx(float(exact_V[ord("c")]), rel=1e-12)
    assert is_greedy == (int(exact_V.argmax()) == ord("c"))
    assert asked(adapter, "loglikelihood", "ab", chr(int(exact_V.argmax())))[1]


def test_two_tokens_have_the_bound(adapter: Any) -> None:
    c, d = b"cd"
    both = log_probs(adapter, BOS, MASK, MASK)
    first, second = log_probs(adapter, BOS, MASK, d)[1, c], log_probs(adapter, BOS, c, MASK)[2, d]
    two_masked, one_masked = both[1, c] + both[2, d], first + second  # 2 / 1 times the mean over which is masked
    found, _ = asked(adapter, "loglikelihood", "", "cd")
    # of 4096 draws half have one mask, where 2 first and 2 second alternate by chance
    error = float((first - second).abs()) / 4096**0.5
    assert found == pytest.approx(float(two_masked + one_masked) / 2, abs=5 * error + 1e-9)


def test_a_long_text_is_scored_in_rows(adapter: Any) -> None:
    adapter.draws = 8
    text = "the quick brown fox jumps over the lazy dog"  # 43 bytes; a row has 32 tokens, the first is BOS
    parts = [asked(adapter, "loglikelihood", "", part)[0] for part in (text[:31], text[31:])]
    assert asked(adapter, "loglikelihood_rolling", text) == pytest.approx(sum(parts), rel=1e-12)


def test_generation_ends_where_it_is_told(adapter: Any) -> None:
    found = asked(adapter, "generate_until", "the fox", {"max_gen_toks": 12, "until": []})
    assert len(found) > 0
    assert (
        asked(adapter, "generate_until", "the fox", {"max_gen_toks": 12, "until": [found[2]]})
        == found.split(found[2])[0]
    )


def test_a_local_task(adapter: Any, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate

    rows = [{"text": "dog ", "choices": ["a", "b"]}, {"text": "cat ", "choices": ["c", "d"]}]
    for row in rows:  # the label is what the network prefers, in the first row, and the other in the second
        last_V = log_probs(adapter, BOS, *str(row["text"]).encode(), MASK)[-1]
        row["label"] = int(last_V[ord(row["choices"][1])] > last_V[ord(row["choices"][0])])
    rows[1]["label"] = 1 - int(rows[1]["label"])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "letters", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "doc_to_text": "{{text}}", "doc_to_target": "{{label}}", "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    found = simple_evaluate(model=adapter, tasks=[task], bootstrap_iters=0)
    assert found["results"]["letters"]["acc,none"] == 0.5


def test_time_conditioning_is_refused(train_run: Train, tmp_path: Path) -> None:
    from lm_eval_adapter import MaskedDiffusion

    assert train_run("model.time_conditioning=true") == 0
    assert convert_ckpt.main([str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    with pytest.raises(ValueError, match="time conditioning"):
        MaskedDiffusion(str(tmp_path / "hf"))
