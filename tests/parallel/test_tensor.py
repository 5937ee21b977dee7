"""The plan and what it makes of a model: megatron-core's layers, padding that stays zero, less to keep when sliced."""

from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from parity.cells import differences, fsdp, modern, plain, zero
from parity.ranks import run_ranks
from parity.trial import (
    CPU,
    MASK_ID,
    VOCAB,
    Trial,
    config_of,
    initial,
    make_loader,
    parameters,
    source,
)
from torch.autograd.graph import saved_tensors_hooks

from mdlm_scale.config import Precision
from mdlm_scale.model.dit import DiT
from mdlm_scale.parallel import tensor
from mdlm_scale.parallel.groups import Groups, Over
from mdlm_scale.run import checkpoint
from mdlm_scale.run.attempt import Attempt
from mdlm_scale.run.build import build_engine, build_model, layout_of
from mdlm_scale.run.checkpoint import State
from mdlm_scale.run.ema import Ema
from mdlm_scale.run.saver import Saver
from mdlm_scale.run.step import forward_backward


def whole_model(trial: Trial | None = None) -> DiT:
    return build_model(config_of(trial or plain()), VOCAB, MASK_ID)


@pytest.mark.parametrize("pattern", tensor.PLAN)
def test_every_line_of_the_plan_names_parameters(pattern: str) -> None:
    models = (whole_model(), whole_model(modern(plain())))
    assert any(fnmatch(name, pattern) for model in models for name, _ in model.named_parameters())


def test_what_grows_with_the_square_of_the_width_or_the_vocabulary_is_cut() -> None:
    """What is on every rank, of a model of a billion, is less than a thirtieth of it."""
    with torch.device("meta"):
        model = DiT(replace(config_of(plain()).model, hidden_size=2048, num_layers=20, cond_size=128), 50258, 0)
    sizes = {name: tensor.place(name, p.shape, 0, 8) for name, p in model.named_parameters()}
    everywhere = sum(place.whole.numel() for place in sizes.values() if not place.is_cut)
    assert everywhere / sum(place.whole.numel() for place in sizes.values()) < 1 / 30


def made(groups: Groups, trial: Trial) -> dict[str, Any]:
    """What `cut` makes of a model, as text."""
    assert groups.tp is not None
    model = whole_model()
    tensor.cut(model, groups.tp, trial.parallel.sequence_parallel)
    block = model.blocks[0]
    return {
        "kinds": [type(m).__mro__[1].__name__ for m in (block.qkv, block.mlp_in, block.attn_out, block.mlp_out)],
        "embedding": type(model.embed).__mro__[1].__name__,
        "devices": {p.device.type for p in model.parameters()},
        "heads": block.num_kv_heads,
        "shard": (model.head.shard.start, model.head.shard.num_valid, len(model.head.weight)),
        "names": [name for name, _ in model.named_parameters()],
    }


@pytest.mark.parametrize("sliced", [False, True])
def test_layers_are_those_of_megatron_core(sliced: bool) -> None:
    column, row = ColumnParallelLinear.__name__, RowParallelLinear.__name__
    for rank, found in enumerate(run_ranks(made, 2, fsdp(2, tp_size=2, sequence_parallel=sliced), tp_size=2)):
        assert found["kinds"] == [column, column, row, row]
        assert found["embedding"] == VocabParallelEmbedding.__name__
        assert found["devices"] == {"meta"}
        assert found["heads"] == 2
        assert found["shard"] == (31 * rank, (31, 30)[rank], 31)  # of 61 tokens
        assert found["names"] == [name for name, _ in whole_model().named_parameters()]


def test_a_rank_may_have_nothing_but_padding() -> None:
    """9 tokens on 4 ranks are 3, 3, 3 and none."""
    assert differences(replace(fsdp(4, tp_size=4), vocab_size=9, steps=3)).faults(Precision.float64) == []


def test_logits_of_a_part_of_the_vocabulary_are_refused() -> None:
    head = whole_model().head
    head.shard = tensor.VocabShard(num_valid=3)
    with pytest.raises(AssertionError, match="of the whole vocabulary"):
        head.logits(torch.empty(1, 32, device="meta"))


def trained(groups: Groups, trial: Trial, folder: Path) -> dict[str, Any]:
    """Some steps, then a checkpoint; whole parameters, and what the padding of the vocabulary has become."""
    config = config_of(trial)
    layout = layout_of(config, groups.ranks)
    model = build_model(config, VOCAB, MASK_ID)
    names = [name for name, _ in model.named_parameters()]
    engine = build_engine(config, model, initial, CPU, layout, groups)
    ema = Ema(engine, config.ema.decay)
    loader = make_loader(config, layout, source(padded=True), model.num_dropout_sites)
    for step in range(3):
        forward_backward(engine, loader.at(step), groups)
        engine.step(lambda norm: True, 1e-3)
        ema.update(engine, step + 1)
    loader.close()
    config = replace(config, run=replace(config.run, dir=str(folder)))
    attempt = Attempt(folder, groups.gather(Attempt.begin(folder).number if layout.rank == 0 else None)[0])
    saver = Saver(config, layout, groups, checkpoint.parts(engine.shards(), ema), {}, attempt, None)
    saver.save(State(3, 3))
    saver.finish()
    padding = []
    for name in ("embed.weight", "head.weight", "head.bias"):
        shard = engine.shards().get(name)
        if shard is not None and layout.tp_rank == layout.tp_size - 1:
            real = VOCAB - shard.place.offset[0]
            first = max(0, real * (shard.place.shape.numel() // shard.place.shape[0]) - shard.start)
            for flat in (shard.master, shard.exp_avg, shard.exp_avg_sq, ema.flats[name]):
                padding += flat[first:].tolist()
    return {"parameters": parameters(engine, names), "padding": padding}


@pytest.mark.parametrize(
    "trial", [fsdp(4, tp_size=2), zero(1, 4, tp_size=2), zero(3, 4, tp_size=2)], ids=["FSDP2", "ZeRO 1", "ZeRO 3"]
)
def test_padding_never_trains_and_is_not_in_a_checkpoint(tmp_path: Path, trial: Trial) -> None:
    """61 tokens on two ranks are padded by one row. The padding is zero in weights, moments and averages."""
    trial = replace(trial, precision=Precision.float32)
    ranks = run_ranks(trained, 4, trial, tmp_path, tp_size=2)
    padding = [value for rank in ranks for value in rank["padding"]]
    assert len(padding) == 4 * (2 * 32 + 1)
    assert set(padding) == {0.0}
    path = tmp_path / "checkpoints" / "step-000003"
    manifest = checkpoint.read_manifest(path)
    for name, value in ranks[0]["parameters"].items():
        stored = checkpoint.read_tensor(path, manifest, f"model/{name}")
        assert torch.equal(stored, value), name
        boxes = manifest["tensors"][f"model/{name}"]["boxes"]
        assert sum(torch.Size(box["size"]).numel() for box in boxes) == value.numel()  # each element once


def kept(groups: Groups, trial: Trial) -> set[tuple[int, ...]]:
    """Shapes of the activations that a forward pass keeps for the backward pass; weights have two dimensions."""
    config = config_of(trial)
    layout = layout_of(config, groups.ranks)
    model = build_model(config, VOCAB, MASK_ID)
    engine: Any = build_engine(config, model, initial, CPU, layout, groups)
    loader = make_loader(config, layout, source(padded=True), model.num_dropout_sites)
    shapes: set[tuple[int, ...]] = set()

    def note(saved: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(saved.shape))
        return saved

    with saved_tensors_hooks(note, lambda saved: saved):
        engine.model(loader.at(0)[0])
    loader.close()
    return {shape for shape in shapes if len(shape) > 2}


def test_sequence_parallelism_keeps_slices_alone() -> None:
    """Two sequences of 16 positions, width 32: without it norms and residuals are whole on every rank; with it not even
    the input of a matrix, which is joined for the product, is kept whole."""
    assert (2, 16, 32) in run_ranks(kept, 2, fsdp(2, tp_size=2), tp_size=2)[0]
    sliced = run_ranks(kept, 2, fsdp(2, tp_size=2, sequence_parallel=True), tp_size=2)[0]
    assert (2, 8, 32) in sliced
    assert (2, 16, 32) not in sliced


def sums(groups: Groups) -> list[float]:
    value = [10.0**groups.ranks.rank]
    return [groups.sum(value)[0], *(groups.sum(value, over)[0] for over in Over)]


def test_sums_go_over_the_ranks_they_name() -> None:
    """tp 2 x dp 2: neighbours share matrices."""
    assert run_ranks(sums, 4, tp_size=2) == [
        [101.0, 101.0, 11.0, 1111.0],
        [1010.0, 1010.0, 11.0, 1111.0],
        [101.0, 101.0, 1100.0, 1111.0],
        [1010.0, 1010.0, 1100.0, 1111.0],
    ]
    assert run_ranks(sums, 2) == [[11.0, 11.0, 1.0, 11.0], [11.0, 11.0, 10.0, 11.0]]
