"""An exported folder alone: transformers and torch load it, and it computes, encodes and draws as ours does."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import convert_ckpt
import pytest
import torch
from conftest import Train
from convert_hf_files import write_tokenizer
from convert_hf_model import MdlmConfig, MdlmForMaskedLM, mask_prob, sigma
from originals import golden, hugging_face
from runs import arguments
from tokenizers import Tokenizer as Made
from tokenizers import models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer

from mdlm_scale import train
from mdlm_scale.config import DiffusionConfig, ScheduleName, TokenizerConfig
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.diffusion import schedule
from mdlm_scale.run.sample import find_trained, load_model

EXACT = 1e-6  # float32, absolute, of logits of order 1: the brief of an export, and rounding of a few operations
ALONE = """
import json, sys
class Never:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mdlm_scale", "omegaconf", "convert_hf_model"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Never())
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
folder, told = sys.argv[1], {}
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
z_BL, sigma_B = torch.load("z.pt"), torch.tensor([0.5, 3.0, 0.0, 1.0], dtype=torch.float64)
labels = torch.full_like(z_BL, 7).masked_fill(z_BL != model.config.mask_token_id, -100)
with torch.no_grad():
    out = model(input_ids=z_BL, timesteps=sigma_B, labels=labels)
torch.save({"logits": out.logits, "loss": out.loss, "labels": labels}, "out.pt")
prompt = torch.tensor([tokenizer("a dog").input_ids])
for sampler in ("ancestral", "first_hitting"):
    asked = {"num_samples": 2, "num_steps": 9, "sampler": sampler}
    told[sampler] = [model.generate(prompt, **asked, seed=seed).tolist() for seed in (3, 3, 4)]
told["text"] = tokenizer.decode(prompt[0])
told["parameters"] = sum(p.numel() for p in model.parameters())
model.save_pretrained("again")
again = AutoModelForMaskedLM.from_pretrained("again", trust_remote_code=True)
told["saved again"] = torch.equal(again(z_BL, sigma_B).logits, out.logits)
assert not {"mdlm_scale", "flash_attn", "omegaconf"} & sys.modules.keys()
json.dump(told, open("told.json", "w"))
"""


@pytest.fixture(scope="module", params=["paper", "modern"])
def alone(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, request: pytest.FixtureRequest
) -> tuple[Path, dict[str, Any]]:
    """A time-conditioned run, its export, and what a process makes of that which cannot import us."""
    folder = tmp_path_factory.mktemp("alone")
    small = ["train.num_steps=3", "optimizer.lr=0.05", "optimizer.warmup_steps=1", "ema.decay=0.1", "train.device=cpu"]
    block = ["model.block=modern", "model.num_kv_heads=2"] if request.param == "modern" else []
    assert train.main(arguments(folder / "run", corpus, *small, *block, "model.time_conditioning=true")) == 0
    assert convert_ckpt.main([str(folder / "run"), str(folder / "hf"), "--to", "hf"]) == 0
    z_BL = torch.arange(4 * 32).view(4, 32) * 7 % 256
    torch.save(z_BL.masked_fill(z_BL % 3 == 0, 259), folder / "z.pt")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ALONE, str(folder / "hf")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "told.json").read_text())


def test_logits_are_ours(alone: tuple[Path, dict[str, Any]]) -> None:
    folder, told = alone
    model = load_model(find_trained(folder / "run"), torch.device("cpu"))
    z_BL, sigma_B = torch.load(folder / "z.pt"), torch.tensor([0.5, 3.0, 0.0, 1.0], dtype=torch.float64)
    with torch.no_grad():
        logits = model.logits(z_BL, sigma_B, torch.arange(z_BL.numel())).view(4, 32, -1)
    theirs = torch.load(folder / "out.pt")["logits"]
    assert float(logits.abs().max()) > 0.1
    assert (theirs[0] != theirs[1]).any()
    assert float((logits - theirs).abs().max()) <= EXACT
    assert told["saved again"]
    assert told["parameters"] == sum(p.numel() for p in model.parameters())


def test_loss_is_of_labels_without_the_mask(alone: tuple[Path, dict[str, Any]]) -> None:
    found = torch.load(alone[0] / "out.pt")
    logits_BLV, labels_BL = found["logits"].double(), found["labels"]
    answer_BLV = logits_BLV[..., :259]  # the mask is the last token here
    nll_BL = answer_BLV.logsumexp(-1) - answer_BLV.gather(-1, labels_BL.clamp(min=0)[..., None])[..., 0]
    expected = nll_BL[labels_BL != -100].mean()
    assert float(found["loss"]) == pytest.approx(float(expected), rel=1e-5)  # float32


@pytest.mark.parametrize("sampler", ["ancestral", "first_hitting"])
def test_samples_keep_their_prompt(alone: tuple[Path, dict[str, Any]], sampler: str) -> None:
    once, again, other = alone[1][sampler]
    assert once == again != other
    assert [len(sample) for sample in once] == [32, 32]
    assert all(sample[:5] == list(b"a dog") for sample in once)
    assert all(259 not in sample for sample in once)
    assert once[0] != once[1]
    assert alone[1]["text"] == "a dog"


def test_the_folder_tells_its_story(alone: tuple[Path, dict[str, Any]]) -> None:
    folder = alone[0] / "hf"
    card, told = (folder / "README.md").read_text(), json.loads((folder / "config.json").read_text())
    last = [json.loads(line) for line in (alone[0] / "run" / "metrics.jsonl").read_text().splitlines()]
    figures = next(row for row in reversed(last) if row["kind"] == "eval")
    assert f"| ppl | {figures['ppl']} |" in card
    assert "Averaged (EMA) weights, step 3" in card
    assert "global_batch_size: 8" in card
    assert told["time_conditioning"] is True
    assert (told["mask_token_id"], told["bos_token_id"], told["eos_token_id"]) == (259, 256, 257)
    assert "None" not in card


def test_the_example_runs(alone: tuple[Path, dict[str, Any]]) -> None:
    command = [
        sys.executable,
        str(alone[0] / "hf" / "generate.py"),
        "--prompt",
        "the fox",
        "--num",
        "1",
        "--steps",
        "4",
    ]
    environment = os.environ | {"HF_HOME": str(alone[0] / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "--- sample 0\n[BOS]the fox" in done.stdout
    done = subprocess.run([*command, "--length", "3"], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "error: input_ids of shape (1, 8) must be (B, P) with P <= length=3." in done.stderr
    assert "Traceback" not in done.stderr


def test_data_that_was_prepared_is_told(shards: Path, train_run: Train, tmp_path: Path) -> None:
    assert train_run(f"data.train={shards}") == 0
    assert convert_ckpt.main([str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    manifest = json.loads((shards / "manifest.json").read_text())
    assert manifest["fingerprint"] in (tmp_path / "hf" / "README.md").read_text()


def test_the_originals_logits(tmp_path: Path) -> None:
    """What the original's network gave, of a folder made of its folder; no tokenizer is needed."""
    assert convert_ckpt.main([str(hugging_face(tmp_path / "mdlm")), str(tmp_path / "hf"), "--to", "hf"]) == 0
    model, case = MdlmForMaskedLM.from_pretrained(tmp_path / "hf"), golden()
    with torch.no_grad():
        logits = model(input_ids=case["xt"]).logits
    # float32 against another order of sums: see tests/model/test_reference.py
    assert float((logits - case["logits"]).abs().max() / case["logits"].abs().max()) < 1e-5
    assert not (tmp_path / "hf" / "tokenizer.json").exists()


# tokenizers


@pytest.mark.parametrize("name", ["bytes", "text8"])
def test_a_tokenizer_of_ours_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    ours = tokenizer_module.load(TokenizerConfig(name))
    write_tokenizer(tmp_path, ours, 128)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["", " ", "the  fox\n\t jumps", "Grüße, 世界 \U0001f98a", "".join(map(chr, range(256))), "[mask] a[b]c"]
    for text in texts:
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids, repr(text)
        assert theirs.decode(ids) == ours.decode(ids)
    everything = list(range(ours.vocab_size))
    assert len(theirs) == ours.vocab_size
    if name == "text8":  # not every sequence of bytes is text
        assert theirs.decode(everything) == ours.decode(everything)
    for kind in ("bos", "eos", "pad"):
        assert getattr(theirs, f"{kind}_token_id") == getattr(ours, f"{kind}_id")
    assert theirs.mask_token_id == ours.mask_id
    assert theirs("a[MASK]b", add_special_tokens=False).input_ids == [
        *ours.encode("a"),
        ours.mask_id,
        *ours.encode("b"),
    ]


def words(folder: Path, *specials: str) -> Path:
    """A Hugging Face tokenizer of words."""
    folder.mkdir()
    made = Made(models.WordLevel({word: i for i, word in enumerate(("a", "dog", "ran", *specials))}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    told |= {"mask_token": "[MASK]"} if "[MASK]" in specials else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize(("specials", "mask_id"), [(("</s>",), 4), (("[MASK]", "</s>"), 3)])
def test_a_mask_token_joins_a_tokenizer_that_has_none(specials: tuple[str, ...], mask_id: int, tmp_path: Path) -> None:
    ours = tokenizer_module.load(TokenizerConfig(str(words(tmp_path / "words", *specials))))
    (tmp_path / "hf").mkdir()
    write_tokenizer(tmp_path / "hf", ours, 32)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.mask_token_id == ours.mask_id == mask_id
    assert theirs("a dog [MASK] ran", add_special_tokens=False).input_ids == [0, 1, mask_id, 2]
    again = tokenizer_module.load(TokenizerConfig(str(tmp_path / "hf")))
    assert (again.vocab_size, again.mask_id) == (ours.vocab_size, ours.mask_id)


def test_a_tokenizer_that_has_moved_is_taken_from_the_export(train_run: Train, tmp_path: Path) -> None:
    folder = words(tmp_path / "words", "</s>")
    assert train_run(f"tokenizer.name={folder}") == 0
    assert convert_ckpt.main([str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    folder.rename(tmp_path / "elsewhere")
    assert convert_ckpt.main([str(tmp_path / "run"), str(tmp_path / "b"), "--to", "native"]) == 2
    for source, given in (("run", ["--tokenizer", str(tmp_path / "elsewhere")]), ("hf", [])):
        target = tmp_path / f"from-{source}"
        assert convert_ckpt.main([str(tmp_path / source), str(target), "--to", "native", *given]) == 0
        assert find_trained(target).tokenizer.mask_id == 4


# samplers


def tiny(vocab_size: int, length: int, seed: int = 0, **changed: Any) -> MdlmForMaskedLM:
    """With weights large enough that tokens depend on each other; the mask is token 1, and its logit the largest."""
    config = MdlmConfig(vocab_size, length, 16, 8, 1, 2, 0.1, mask_token_id=1, **changed)
    model = MdlmForMaskedLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.7)
        model.backbone.output_layer.linear.bias[1] = 50.0
    return model


def guess(model: MdlmForMaskedLM, *z: int) -> Tensor:
    """The network's probabilities at each position, without the mask, (L, V) float64."""
    logits_LV = model(torch.tensor([z])).logits[0].detach().double()
    logits_LV[:, 1] = -torch.inf
    return logits_LV.softmax(-1)


def total_variation(samples: Tensor, law: dict[tuple[int, ...], float]) -> float:
    counts = Counter(map(tuple, samples.tolist()))
    assert counts.keys() <= law.keys()
    return sum(abs(counts[z] / len(samples) - p) for z, p in law.items()) / 2


def law_by_order(model: MdlmForMaskedLM) -> dict[tuple[int, ...], float]:
    """Of two tokens made one after the other, in either order."""
    both, found = guess(model, 1, 1), {}
    for a in (0, 2, 3):
        for b in (0, 2, 3):
            first, second = both[0, a] * guess(model, a, 1)[1, b], both[1, b] * guess(model, 1, b)[0, a]
            found[a, b] = float(first + second) / 2
    return found


@pytest.mark.parametrize("sampler", ["first_hitting", "ancestral"])
def test_samples_have_their_law(sampler: str) -> None:
    """Two tokens of three values. Of many steps, two tokens fall into the same one in 1/400 of the samples."""
    model, num = tiny(4, 2), 40_000
    law = law_by_order(model)
    assert sum(law.values()) == pytest.approx(1.0)
    one_step = {(a, b): float(guess(model, 1, 1)[0, a] * guess(model, 1, 1)[1, b]) for a, b in law}
    assert sum(abs(law[z] - one_step[z]) for z in law) / 2 > 0.05  # what follows tells the two apart
    samples = model.generate(num_samples=num, num_steps=400, sampler=sampler, seed=1)
    # nine cells of 40,000 samples: a total variation of about 0.006 by chance
    assert total_variation(samples, law) < 0.02
    if sampler == "ancestral":
        assert total_variation(model.generate(num_samples=num, num_steps=1, seed=1), one_step) < 0.02


def test_holes_are_filled_and_the_rest_stays() -> None:
    model = tiny(7, 6)
    text = torch.tensor([[3, 1, 4, 1], [2, 2, 2, 2]])
    for sampler in ("first_hitting", "ancestral"):
        found = model.generate(text, num_samples=2, num_steps=5, sampler=sampler, seed=0)
        assert found.shape == (4, 6)
        assert (found != 1).all()
        assert found[:2, [0, 2]].tolist() == [[3, 4]] * 2
        assert found[2:, :4].tolist() == [[2] * 4] * 2


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({"num_samples": 0, "num_steps": 0}, "num_samples=0 must.*num_steps=0 must"),
        ({"sampler": "greedy"}, "sampler='greedy' must be ancestral or first_hitting"),
        ({"input_ids": torch.zeros(1, 9, dtype=torch.long)}, "must be"),
    ],
)
def test_samplers_that_cannot_be(asked: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        tiny(4, 2).generate(**asked)


def test_a_network_without_numbers_says_so() -> None:
    model = tiny(5, 4)
    model.backbone.output_layer.linear.bias.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="gives no numbers"):
        model.generate(num_samples=1)


def test_time_conditioning_needs_the_time() -> None:
    model = tiny(4, 2, time_conditioning=True)
    with pytest.raises(ValueError, match="`timesteps`"):
        model(torch.ones(1, 2, dtype=torch.long))
    assert (model.generate(num_samples=8, num_steps=3, sampler="first_hitting", seed=0) != 1).all()


@pytest.mark.parametrize("name", list(ScheduleName))
def test_schedules_are_ours(name: ScheduleName) -> None:
    shape = schedule.from_config(DiffusionConfig(schedule=name))
    told = vars(shape) | {"name": str(name)}
    for t in (0.0, 1e-3, 0.3, 0.9, 1.0):
        exact = torch.tensor(t, dtype=torch.float64)
        assert mask_prob(told, t) == pytest.approx(float(shape.mask_prob(exact)), rel=1e-12, abs=1e-15)
        assert sigma(told, t) == pytest.approx(float(shape.sigma(exact)), rel=1e-9, abs=1e-15)
