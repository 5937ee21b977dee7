"""Checkpoints from every format to every other: the same bits, one clear error for what is wrong, little memory."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import convert_ckpt
import pytest
import torch
from conftest import ROOT, Train
from originals import LENGTH, PARAMETER_ORDER, VOCAB, average, golden, hugging_face, lightning, state_dict
from runs import arguments, tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from mdlm_scale import train
from mdlm_scale.config import ModelConfig
from mdlm_scale.model.dit import DiT
from mdlm_scale.model.names import original_name
from mdlm_scale.run import checkpoint
from mdlm_scale.run.sample import find_trained, load_model

ROUNDING = 1e-5  # float32, of the largest element: see tests/model/test_reference.py


def convert(source: Path, target: Path, to: str, *options: str) -> Path:
    assert convert_ckpt.main([str(source), str(target), "--to", to, *options]) == 0
    return target


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Of a Hugging Face folder, with the original's names, without the rotary buffer."""
    files = sorted(folder.glob("*.safetensors"))
    found = {key: tensor for file in files for key, tensor in load_file(file).items()}
    return {key: tensor for key, tensor in found.items() if not key.endswith("inv_freq")}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [
        key for key in theirs if ours[key].dtype != theirs[key].dtype or not torch.equal(ours[key], theirs[key])
    ] == []


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of three steps in float32."""
    run = tmp_path_factory.mktemp("trained") / "run"
    small = ["train.num_steps=3", "optimizer.lr=0.01", "optimizer.warmup_steps=1", "ema.decay=0.5", "train.device=cpu"]
    assert train.main(arguments(run, corpus, *small)) == 0
    return run


def of_kind(found: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{kind}/"): tensor for key, tensor in found.items() if key.startswith(f"{kind}/")}


@pytest.mark.parametrize("way", [("hf",), ("mdlm",), ("native",), ("hf", "mdlm"), ("mdlm", "hf"), ("native", "hf")])
def test_there_and_back_is_equal_bit_for_bit(way: tuple[str, ...], trained: Path, tmp_path: Path) -> None:
    at = trained
    for i, to in enumerate((*way, "native")):
        at = convert(at, tmp_path / f"{i}-{to}", to)
    before, after = tensors(checkpoint.newest(trained)), tensors(at)
    assert_equal(of_kind(after, "ema"), of_kind(before, "ema"))
    assert any((before[f"model/{key}"] != before[f"ema/{key}"]).any() for key in of_kind(before, "ema"))
    # a format of one set of weights brings that one back as both
    assert_equal(of_kind(after, "model"), of_kind(before, "model" if way == ("native",) else "ema"))


def test_modern_blocks_there_and_back(train_run: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train_run("model.block=modern", "model.num_kv_heads=1") == 0
    back = convert(convert(tmp_path / "run", tmp_path / "hf", "hf"), tmp_path / "back", "native")
    assert_equal(of_kind(tensors(back), "ema"), of_kind(tensors(checkpoint.newest(tmp_path / "run")), "ema"))
    assert find_trained(back).config.model == find_trained(tmp_path / "run").config.model
    said = refused(capfd, tmp_path / "run", tmp_path / "mdlm", "--to", "mdlm")
    assert "has model.block=modern, which the original's code does not know. Choose --to hf or native." in said


def test_raw_weights_on_request(trained: Path, tmp_path: Path) -> None:
    raw = convert(trained, tmp_path / "raw", "hf", "--raw")
    back = convert(raw, tmp_path / "back", "native")
    assert_equal(of_kind(tensors(back), "model"), of_kind(tensors(checkpoint.newest(trained)), "model"))
    assert json.loads((back / "manifest.json").read_text())["converted"]["weights"] == {"ema": "raw", "model": "raw"}
    again = json.loads((convert(back, tmp_path / "again", "hf") / "config.json").read_text())
    assert (again["mdlm_scale"]["weights"], again["mdlm_scale"]["step"]) == ("raw", 3)


def test_one_kind_under_both_names_is_called_what_it_is(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    averaged = convert(convert(trained, tmp_path / "a", "hf"), tmp_path / "averaged", "native")
    raw = convert(convert(trained, tmp_path / "b", "hf", "--raw"), tmp_path / "raw", "native")
    for path, names in ((averaged, ["EMA", "EMA"]), (raw, ["raw", "raw"]), (trained, ["EMA", "raw"])):
        found = find_trained(path)
        assert ([found.weights(raw=False), found.weights(raw=True)], found.step) == (names, 3)
    assert "has only averaged weights" in refused(capfd, averaged, tmp_path / "out", "--raw")


def test_float64_stays_float64(train_run: Train, tmp_path: Path) -> None:
    assert train_run() == 0
    back = convert(convert(tmp_path / "run", tmp_path / "hf", "hf"), tmp_path / "back", "native")
    before = tensors(checkpoint.newest(tmp_path / "run"))
    assert before["ema/embed.weight"].dtype == torch.float64
    assert_equal(of_kind(tensors(back), "ema"), of_kind(before, "ema"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype: str, trained: Path, tmp_path: Path) -> None:
    exact = weights_of(convert(trained, tmp_path / "exact", "hf"))
    rounded = convert(trained, tmp_path / "rounded", "hf", "--dtype", dtype)
    assert_equal(weights_of(rounded), {key: tensor.to(getattr(torch, dtype)) for key, tensor in exact.items()})
    assert json.loads((rounded / "config.json").read_text())["dtype"] == dtype
    native = tensors(convert(rounded, tmp_path / "native", "native"))  # there it is float32 at least
    assert {tensor.dtype for tensor in native.values()} == {torch.float64 if dtype == "float64" else torch.float32}


def test_the_average_of_a_lightning_checkpoint_has_no_names(tmp_path: Path) -> None:
    """It is a list, in the order of the original's parameters; weights and average go their ways."""
    native = convert(lightning(tmp_path / "last.ckpt"), tmp_path / "native", "native")
    kinds = json.loads((native / "manifest.json").read_text())["converted"]["weights"]
    assert kinds == {"ema": "averaged", "model": "raw"}
    expected = {f"backbone.{name}": average()[f"backbone.{name}"] for name in PARAMETER_ORDER}
    assert_equal(weights_of(convert(native, tmp_path / "mdlm", "mdlm")), expected)
    assert_equal(weights_of(convert(tmp_path / "last.ckpt", tmp_path / "direct", "mdlm")), expected)
    raw = weights_of(convert(native, tmp_path / "raw", "mdlm", "--raw"))
    assert_equal(raw, {name: state_dict()[name] for name in expected})


def test_facts_of_a_lightning_checkpoint_are_read_from_its_configuration(tmp_path: Path) -> None:
    manifest = json.loads(
        (convert(lightning(tmp_path / "a.ckpt"), tmp_path / "native", "native") / "manifest.json").read_text()
    )
    assert (manifest["config"]["data"]["length"], manifest["converted"]["step"]) == (LENGTH, 1234)
    assert manifest["config"]["model"] == {
        "hidden_size": 64, "num_layers": 2, "num_heads": 4, "cond_size": 32, "dropout": 0.1, "time_conditioning": False,
        "block": "paper", "num_kv_heads": None,
    }  # fmt: skip


def test_the_rotary_buffer_is_the_originals(tmp_path: Path) -> None:
    found = load_file(convert(lightning(tmp_path / "a.ckpt"), tmp_path / "mdlm", "mdlm") / "model.safetensors")
    assert torch.equal(found["backbone.rotary_emb.inv_freq"], state_dict()["backbone.rotary_emb.inv_freq"])


def test_the_originals_logits(tmp_path: Path) -> None:
    """Of the network made from its folder, in its own order of the vocabulary."""
    native = convert(hugging_face(tmp_path / "original"), tmp_path / "native", "native")
    model, case = DiT(ModelConfig(64, 2, 4, 32), VOCAB, VOCAB - 1), golden()
    model.load_state_dict(of_kind(tensors(native), "ema"))
    z_BL = case["xt"]
    with torch.no_grad():
        logits = model.logits(z_BL, torch.zeros(len(z_BL)), torch.arange(z_BL.numel()))
    error = (logits.view(case["logits"].shape) - case["logits"]).abs().max() / case["logits"].abs().max()
    assert error < ROUNDING


def test_a_checkpoint_without_an_average_exports_its_weights_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mdlm = convert(lightning(tmp_path / "a.ckpt", ema=None), tmp_path / "mdlm", "mdlm")
    said = capfd.readouterr()
    assert "has no averaged (EMA) weights: its raw ones are taken" in said.err
    assert "has no tokenizer" in said.err
    assert "raw weights of" in said.out
    assert_equal(weights_of(mdlm), {f"backbone.{n}": state_dict()[f"backbone.{n}"] for n in PARAMETER_ORDER})


def test_a_converted_checkpoint_is_sampled_as_the_run_is(trained: Path, tmp_path: Path) -> None:
    native = convert(trained, tmp_path / "native", "native")
    ours, theirs = (load_model(find_trained(path), torch.device("cpu")) for path in (native, trained))
    assert_equal(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert find_trained(native).config == find_trained(trained).config


def test_large_exports_are_cut_into_files(trained: Path, tmp_path: Path) -> None:
    whole, cut = convert(trained, tmp_path / "whole", "hf"), tmp_path / "cut"
    convert(trained, cut, "hf", "--shard-gb", "0.0001")
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    files = {key: file.name for file in cut.glob("*.safetensors") for key in load_file(file)}
    assert index["weight_map"] == files
    assert len(set(files.values())) == 3
    assert max(sum(t.nbytes for t in load_file(file).values()) for file in cut.glob("*.safetensors")) <= 100_000
    assert_equal(weights_of(cut), weights_of(whole))
    assert_equal(tensors(convert(cut, tmp_path / "a", "native")), tensors(convert(whole, tmp_path / "b", "native")))


# What is wrong, and what is said of it


def refused(capfd: pytest.CaptureFixture[str], source: Path, target: Path, *options: str) -> str:
    """What is said, with nothing left behind."""
    before = sorted(target.parent.iterdir())
    assert (
        convert_ckpt.main([str(source), str(target), *(options if "--to" in options else ("--to", "hf", *options))])
        == 2
    )
    assert sorted(target.parent.iterdir()) == before
    return capfd.readouterr().err


def without(key: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        save_file({k: v for k, v in found.items() if k != key}, folder / "model.safetensors")

    return spoil


def with_more(**more: Tensor) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        save_file(load_file(folder / "model.safetensors") | more, folder / "model.safetensors")

    return spoil


def with_fields(**fields: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(told | fields))

    return spoil


def with_header(**fields: object) -> Callable[[Path], None]:
    """What the file says of one tensor."""

    def spoil(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        told = json.loads(data[8:end])
        told["backbone.blocks.0.norm1.weight"] |= fields
        text = json.dumps(told).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return spoil


def cut_short(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


@pytest.mark.parametrize(
    ("spoil", "faults"),
    [
        (without("backbone.blocks.1.attn_qkv.weight"), ["missing keys: backbone.blocks.1.attn_qkv.weight"]),
        (with_more(extra=torch.zeros(1)), ["unknown keys: extra"]),
        (with_fields(n_blocks=3), ["missing keys: backbone.blocks.2.adaLN_modulation.bias, "]),
        (
            with_fields(vocab_size=98, cond_dim=16),
            ["embedding has shape [97, 64], not [98, 64]", "sigma_map.mlp.0.weight has shape [32, 256], not [16, 256]"],
        ),
        (with_fields(n_blocks=10**9), ["1000000000 blocks are told of, and 31 tensors are there"]),
        (with_fields(n_heads=5), ["num_heads=5 does not divide"]),
        (with_fields(n_heads=8), ["inv_freq has shape [8], not [4]"]),
        (
            with_more(**{"backbone.rotary_emb.inv_freq": torch.ones(8)}),
            ["backbone.rotary_emb.inv_freq is not that of base 10000"],
        ),
        (with_fields(hidden_dim="64", n_blocks=None), ["hidden_dim='64' must be", "n_blocks=None must be"]),
        (with_fields(dropout="low", mask_token_id=1.5), ["dropout='low' is of", "mask_token_id=1.5 is of"]),
        (with_fields(mdlm_scale=3), ["does not describe itself as such files do"]),
        (with_fields(model_type="bert"), ["of model_type 'bert', which is unknown"]),
        (with_header(shape=[64.0]), ["norm1.weight has sizes that are none"]),
        (with_header(data_offsets=[-256, 0]), ["norm1.weight has sizes that are none"]),
        (with_header(dtype="I64"), ["no complete safetensors file of floating-point weights"]),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), ["does not describe itself"]),
        (cut_short, ["no complete safetensors file"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["holds no model.safetensors"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json cannot be read"]),
        (lambda folder: (folder / "config.json").unlink(), ["is no checkpoint. It must be a run directory"]),
    ],
)  # fmt: skip
def test_a_spoilt_folder(
    spoil: Callable[[Path], None], faults: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(hugging_face(tmp_path / "original"))
    said = refused(capfd, tmp_path / "original", tmp_path / "out")
    assert [fault for fault in faults if fault not in said] == []
    assert str(tmp_path / "original") in said
    assert "Traceback" not in said


def test_a_flipped_byte(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    native = convert(trained, tmp_path / "native", "native")
    data = bytearray((native / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (native / "weights.safetensors").write_bytes(data)
    assert "weights.safetensors does not have the sha256 of the manifest" in refused(capfd, native, tmp_path / "out")


@pytest.mark.parametrize("to", ["hf", "mdlm"])
def test_a_flipped_byte_of_an_export(to: str, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Unless the sums are gone too, as when somebody trained on and saved it."""
    export = convert(trained, tmp_path / "export", to)
    assert subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=export, timeout=60).returncode == 0
    data = bytearray((export / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (export / "model.safetensors").write_bytes(data)
    assert "does not have the sha256 that SHA256SUMS tells" in refused(capfd, export, tmp_path / "out")
    (export / "SHA256SUMS").unlink()
    convert(export, tmp_path / "out", "native")


def test_a_manifest_that_is_none(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    native = convert(trained, tmp_path / "native", "native")
    manifest = json.loads((native / "manifest.json").read_text())
    key = "ema/blocks.0.qkv.weight"
    for changed, fault in (
        ({"tensors": {}}, "names no embed.weight"),
        ({"tensors": {k: v for k, v in manifest["tensors"].items() if k != key}}, f"missing keys: {key}"),
        (
            {"tensors": manifest["tensors"] | {key: {"shape": [96, 32], "dtype": "float32", "boxes": []}}},
            "has 0 elements",
        ),
        ({"state": None}, "does not describe itself"),
        ({"format": 99}, "has format 99, of another version"),
    ):
        (native / "manifest.json").write_text(json.dumps(manifest | changed))
        assert fault in refused(capfd, native, tmp_path / "out"), changed.keys()


def test_lightning_checkpoints_that_are_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.ckpt"
    weights, shadow = state_dict(), [tensor for name, tensor in average().items() if "rotary" not in name]
    for changed, fault in (
        ({"state_dict": {"weight": torch.zeros(2)}}, "its state_dict is not the original's"),
        ({"state_dict": weights | {"backbone.blocks.9999999.x": torch.zeros(1)}}, "10000000 blocks are told of"),
        ({"state_dict": weights | {"backbone.more": torch.zeros(1)}}, "unknown keys: backbone.more"),
        ({"ema": {"shadow_params": shadow[:-1]}}, "missing keys: ema.shadow_params[29]"),
        ({"ema": {"shadow_params": [*shadow[:-1], torch.zeros(1)]}}, "ema.shadow_params[29] has shape [1], not [128]"),
        ({"state_dict": None}, "holds no `state_dict`"),
    ):
        assert fault in refused(capfd, lightning(path, **changed), tmp_path / "out"), changed.keys()
    path.write_text("text")
    assert "no complete file of torch.save" in refused(capfd, path, tmp_path / "out")


def test_all_faults_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    without("backbone.blocks.0.norm1.weight")(hugging_face(tmp_path / "original"))
    said = refused(capfd, tmp_path / "original", tmp_path / "there", "--tokenizer", "nowhere/at-all", "--shard-gb", "0")
    assert "4 faults" in said
    for fault in ("exists. Choose", "--shard-gb 0.0 must", "--tokenizer 'nowhere/at-all' is no folder", "missing keys"):
        assert fault in said


def test_tokenizers_and_masks_that_do_not_fit(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target = hugging_face(tmp_path / "original"), tmp_path / "out"
    assert "'bytes' has 260 entries, the mask included, and the model 97" in refused(
        capfd, source, target, "--tokenizer", "bytes"
    )
    assert "mask id 97 is outside the vocabulary, 0 .. 96" in refused(capfd, source, target, "--mask-id", "97")
    assert "mask of the tokenizer 'bytes' is token 259, not 7" in refused(capfd, trained, target, "--mask-id", "7")
    assert "--raw" in refused(capfd, source, target, "--raw")
    said = refused(capfd, trained, target, "--to", "native", "--dtype", "bfloat16")
    assert "--dtype bfloat16: native checkpoints are of float32 at least" in said


@pytest.mark.parametrize(("given", "options", "expected"), [
    ({}, [], 96), ({"mask_token_id": 5}, [], 5), ({"mask_index": 6}, [], 6),
    ({"mask_token_id": 5}, ["--mask-id", "7"], 7), ({"vocab_size": 35}, ["--tokenizer", "text8"], 4),
])  # fmt: skip
def test_the_mask_id(given: dict[str, int], options: list[str], expected: int, tmp_path: Path) -> None:
    weights = state_dict()
    size = given.get("vocab_size", VOCAB)
    for name in ("vocab_embed.embedding", "output_layer.linear.weight", "output_layer.linear.bias"):
        weights[f"backbone.{name}"] = weights[f"backbone.{name}"][:size].contiguous()
    source = hugging_face(tmp_path / "original", weights, **given)
    exported = convert(source, tmp_path / "hf", "hf", *options)
    assert json.loads((exported / "config.json").read_text())["mask_token_id"] == expected
    native = convert(exported, tmp_path / "native", "native")
    again = convert(native, tmp_path / "again", "mdlm")
    assert json.loads((again / "config.json").read_text())["mask_token_id"] == expected


def test_targets_that_are_in_the_way(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target, mine = tmp_path / "out", tmp_path / "mine"
    convert(trained, target, "native")
    assert "exists. Choose another folder, or --force" in refused(capfd, trained, target)
    convert(trained, target, "mdlm", "--force")
    assert sorted(file.name for file in target.iterdir()) == ["SHA256SUMS", "config.json", "model.safetensors"]
    mine.mkdir()
    (mine / "thesis.txt").write_text("dear to me")
    assert "--force does not replace it" in refused(capfd, trained, mine, "--force")
    step = checkpoint.newest(trained)
    assert step is not None
    assert "--force does not replace it" in refused(capfd, target, step, "--force")
    assert "is SRC, or one holds the other" in refused(capfd, target, target, "--force")
    assert "is SRC, or one holds the other" in refused(capfd, trained, trained.parent, "--force")
    assert "is SRC, or one holds the other" in refused(capfd, target, target / "inside")
    assert convert_ckpt.main([str(trained), str(mine / "thesis.txt" / "out"), "--to", "hf"]) == 2
    assert f"cannot be made: {mine / 'thesis.txt'}: Not a directory" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_as_a_command(trained: Path, tmp_path: Path) -> None:
    """It says what was written, and the next command."""
    tool = [sys.executable, str(ROOT / "tools" / "convert_ckpt.py")]
    done = subprocess.run(
        [*tool, str(trained), "native", "--to", "native"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("native: averaged (EMA) weights of ")
    assert "next: python -m mdlm_scale.sample --checkpoint native" in done.stdout
    assert "reading" in done.stderr  # the progress line, which appears now and then without a terminal
    assert subprocess.run([*tool, str(trained), "x", "--to", "onnx"], capture_output=True, timeout=60).returncode == 2


MEASURE = """
import sys
sys.path[:0] = {paths!r}
import convert_ckpt, convert_targets
import torch
from pathlib import Path
def kilobytes(name):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
torch.ones(64, 64).to(torch.bfloat16) @ torch.ones(64, 64).to(torch.bfloat16)  # what torch sets up at first use
before = kilobytes("VmHWM")
assert convert_ckpt.main(sys.argv[1:]) == 0
print("peak", kilobytes("VmHWM") - before)
"""


@pytest.mark.parametrize(
    ("vocab", "model"),
    [
        (48_000, ModelConfig(256, 2, 4, 32)),
        pytest.param(50_258, ModelConfig(), marks=pytest.mark.slow),  # the paper's small model
    ],
)
def test_memory_is_that_of_one_tensor(vocab: int, model: ModelConfig, tmp_path: Path) -> None:
    """Conversion adds at most 1.5 of the largest tensor (49 and 154 MB) to the interpreter's highest memory."""
    with torch.device("meta"):
        shapes = {f"backbone.{original_name(name)}": p.shape for name, p in DiT(model, vocab, 0).named_parameters()}
    weights = {key: torch.rand(shape) for key, shape in shapes.items()}
    told = {"vocab_size": vocab, "hidden_dim": model.hidden_size, "n_blocks": model.num_layers}
    told |= {"n_heads": model.num_heads, "cond_dim": model.cond_size}
    source = hugging_face(tmp_path / "original", weights, **told)
    config = {"config": {"model": {"n_heads": model.num_heads}}}
    torch.save({"state_dict": weights, "hyper_parameters": config}, tmp_path / "a.ckpt")
    del weights
    calls = [
        [str(source), str(tmp_path / "native"), "--to", "native"],
        [str(tmp_path / "native"), str(tmp_path / "hf"), "--to", "hf", "--dtype", "bfloat16"],
        [str(tmp_path / "a.ckpt"), str(tmp_path / "mdlm"), "--to", "mdlm"],
    ]
    program = MEASURE.format(paths=[str(ROOT), str(ROOT / "tools")])
    for call in calls:
        done = subprocess.run([sys.executable, "-c", program, *call], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        peak = 1024 * int(done.stdout.split("peak")[1])
        assert peak < 1.5 * 4 * vocab * model.hidden_size, f"{peak / 1e6:.0f} MB for {call[3]}"
