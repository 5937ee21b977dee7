"""Mistakes that data-parallel trainers make, made here on purpose: a suite that does not see them proves nothing.

Each bug patches the package in the ranks' processes alone, before they build anything.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mdlm_scale.layout import Layout
from mdlm_scale.parallel.groups import Groups
from parity import trial as trial_module
from parity.cells import SELECTIVE, SLICED, TP2, WHOLE, differences, fsdp, modern, zero
from parity.trial import Bug, Trial


def _mean_in_fsdp(groups: Groups) -> None:
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]


def _mean_in_zero(groups: Groups) -> None:
    from mdlm_scale.parallel import zero_json

    ours = zero_json.ours
    zero_json.ours = lambda *args: {k: v for k, v in ours(*args).items() if k != "gradient_allreduce_op"}


def _mean_in_zero_3(groups: Groups) -> None:
    from mdlm_scale.parallel import deepspeed

    forward_backward = deepspeed.ZeroEngine.forward_backward

    def unscaled(self: Any, batches: Any, denominator: float) -> Any:
        return forward_backward(self, batches, denominator * groups.ranks.size)

    deepspeed.ZeroEngine.forward_backward = unscaled  # type: ignore[method-assign]


def _per_rank_mean(groups: Groups) -> None:
    """Each rank divides by its own number of tokens, and the means are averaged."""
    right = trial_module.forward_backward

    def wrong(engine: Any, batches: Any, groups: Groups) -> Any:
        def add(values: list[float]) -> list[float]:
            is_count = len(values) == 1
            return [groups.ranks.size * value for value in values] if is_count else groups.sum(values)

        return right(engine, batches, SimpleNamespace(sum=add))  # type: ignore[arg-type]

    trial_module.forward_backward = wrong


def _masks_by_rank(groups: Groups) -> None:
    _shift_seed("is_masked", groups.ranks.rank)


def _dropout_by_rank(groups: Groups) -> None:
    _shift_seed("dropout_keys", groups.ranks.rank)


def _shift_seed(name: str, rank: int) -> None:
    from mdlm_scale.diffusion import noise

    right = getattr(noise, name)
    setattr(noise, name, lambda seed, *args: right(seed + rank, *args))


def _times_by_rank(groups: Groups) -> None:
    """Every rank spreads the times of its own slots, the same on all."""
    from mdlm_scale.diffusion import noise

    right, size = noise.times, groups.ranks.size
    noise.times = lambda config, seed, step, num: right(config, seed, step, num // size).repeat(size)


def _ema_skipped(groups: Groups) -> None:
    if groups.ranks.rank == 1:
        trial_module.Ema.update = lambda self, engine, updates: None  # type: ignore[method-assign]


def _clip_before_reduce(groups: Groups) -> None:
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

    right = DeepSpeedEngine.buffered_allreduce_fallback

    def clipped(self: Any, grads: Any) -> None:
        norm = float(torch.stack([g.norm() for g in grads]).norm())
        for gradient in grads:
            gradient.mul_(min(1.0, 0.05 / norm))
        right(self, grads=grads)

    DeepSpeedEngine.buffered_allreduce_fallback = clipped


def _slots_off_by_one(groups: Groups) -> None:
    right = Layout.slots

    def shifted(self: Layout, num_slots: int) -> range:
        next_rank = min(self.rank + 1, self.world_size - 1)
        return right(replace(self, rank=next_rank), num_slots)

    Layout.slots = shifted  # type: ignore[method-assign]


def _norm_of_one_shard(groups: Groups) -> None:
    from mdlm_scale.parallel import masters

    make = masters.Masters.__init__

    def alone(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs | {"sum_ranks": lambda squares: squares})

    masters.Masters.__init__ = alone  # type: ignore[method-assign]


def _stale_in_fsdp(groups: Groups) -> None:
    from mdlm_scale.parallel import fsdp as fsdp_module

    fsdp_module.FsdpEngine._sharded = lambda self: []  # type: ignore[method-assign]


def _stale_in_zero_3(groups: Groups) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    DeepSpeedEngine.empty_partition_cache = lambda self: None


def _replicas_of_the_last(groups: Groups) -> None:
    """Of the micro-batches before the last, replicas keep what is their own."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    FSDPParamGroup._partial_reduce_output = property(lambda self: None, lambda self, value: None)


def _tp_norm_twice_in_fsdp(groups: Groups) -> None:
    from mdlm_scale.parallel.cut import Cut

    Cut.copies = lambda self, name: 1  # type: ignore[method-assign]


def _tp_norm_twice_in_zero(groups: Groups) -> None:
    """Every parameter is marked as cut, the replicated ones too."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    for module in (stage3, stage_1_and_2):
        module.is_model_parallel_parameter = lambda p: True


def _partial_gradients(groups: Groups) -> None:
    """Replicated parameters keep the gradients of this rank's positions."""
    from mdlm_scale.parallel.cut import Cut

    Cut.sum_partial = lambda self, gradients: None  # type: ignore[method-assign]
    Cut.sum_partial_in_backward = lambda self, weights: None  # type: ignore[method-assign]


def _no_mpu(groups: Groups) -> None:
    """DeepSpeed takes tensor-parallel ranks for data-parallel ones; it must be told a batch that fits these."""
    from mdlm_scale.parallel import deepspeed, zero_json

    right = zero_json.ours
    deepspeed._mpu = lambda groups: None  # type: ignore[assignment,return-value]

    def fitting(config: Any, batch: Any, *args: Any) -> Any:
        told = right(config, batch, *args)
        return told | {"train_batch_size": told["train_batch_size"] * config.tp_size}

    zero_json.ours = fitting


def _padding_is_an_answer(groups: Groups) -> None:
    from mdlm_scale.parallel import tensor

    right = tensor.VocabShard
    tensor.VocabShard = lambda **fields: right(**fields | {"num_valid": None})  # type: ignore[assignment,misc]


def _hidden_of_one_rank(groups: Groups) -> None:
    """The gradient of the hidden rows is that of this rank's part of the vocabulary."""
    from mdlm_scale.parallel import tensor

    right = tensor.VocabShard
    tensor.VocabShard = lambda **fields: right(**fields | {"sum_hidden": lambda d: d})  # type: ignore[assignment,misc]


def _dropout_from_position_zero(groups: Groups) -> None:
    """Every rank drops as if its slice were the first."""
    from mdlm_scale.model.dit import Block

    Block.position_slice = property(lambda self: 0, lambda self, value: None)  # type: ignore[assignment]


def _bias_on_every_rank(groups: Groups) -> None:
    """The bias of a matrix whose outputs are added up is added before the sum, once a rank."""
    from mdlm_scale.parallel import tensor

    right = tensor._Row.forward

    def forward(self: Any, x: Any) -> Any:
        out = right(self, x)
        return out if self.bias is None else out + self.bias

    tensor._Row.forward = forward  # type: ignore[method-assign]


def _sum_in_place(groups: Groups) -> None:
    """As megatron-core's own sum: it changes the product that selective recomputation has kept."""
    from mdlm_scale.parallel import tensor

    tensor._Sum.forward = staticmethod(lambda ctx, x, group: tensor._summed(group, x))  # type: ignore[method-assign]


def _decay_by_shape(groups: Groups) -> None:
    """What decays is told by the shape of what a rank holds, which is flat for a matrix too."""
    from mdlm_scale.run import optimizer

    right = optimizer.groups
    optimizer.groups = lambda params, _: right(params, {name for name, p in params.items() if p.dim() < 2})


BUGS: dict[str, tuple[Bug, Trial]] = {
    "gradient divided by dp (FSDP2)": (_mean_in_fsdp, fsdp(2)),
    "gradient divided by dp (ZeRO 1)": (_mean_in_zero, zero(1, 2)),
    "gradient divided by dp (ZeRO 3)": (_mean_in_zero_3, zero(3, 2)),
    "per-rank masked mean": (_per_rank_mean, fsdp(2)),
    "masks seeded by rank": (_masks_by_rank, fsdp(2)),
    "dropout seeded by rank": (_dropout_by_rank, fsdp(2)),
    "times stratified per rank": (_times_by_rank, fsdp(2)),
    "EMA skipped on one rank": (_ema_skipped, fsdp(2)),
    "clip before reduce": (_clip_before_reduce, zero(0, 2)),
    "loader off by one rank": (_slots_off_by_one, fsdp(2)),
    "norm of one rank's shard": (_norm_of_one_shard, fsdp(2)),
    "stale weights after an evaluation (FSDP2)": (_stale_in_fsdp, fsdp(2, reshard_after_forward=False)),
    "stale weights after an evaluation (ZeRO 3)": (_stale_in_zero_3, zero(3, 2, WHOLE)),
    "earlier micro-batches not summed over replicas": (_replicas_of_the_last, fsdp(4, 1, replicate_size=2)),
    "tensor-parallel norm counted twice (FSDP2)": (_tp_norm_twice_in_fsdp, fsdp(2, **TP2)),
    "tensor-parallel norm counted twice (ZeRO 1)": (_tp_norm_twice_in_zero, zero(1, 2, **TP2)),
    "tensor-parallel norm counted twice (ZeRO 3)": (_tp_norm_twice_in_zero, zero(3, 2, **TP2)),
    "replicated gradients not reduced over tp (FSDP2)": (_partial_gradients, fsdp(2, **TP2, **SLICED)),
    "replicated gradients not reduced over tp (ZeRO 1)": (_partial_gradients, zero(1, 2, **TP2, **SLICED)),
    "tensor-parallel ranks taken for data-parallel (ZeRO 1)": (_no_mpu, zero(1, 2, **TP2)),
    "padding of the vocabulary is an answer": (_padding_is_an_answer, fsdp(2, **TP2)),
    "gradient of hidden rows not reduced over tp": (_hidden_of_one_rank, fsdp(2, **TP2)),
    "dropout of every slice from position 0": (_dropout_from_position_zero, fsdp(2, **TP2, **SLICED)),
    "bias added on every tensor-parallel rank": (_bias_on_every_rank, fsdp(2, **TP2)),
    "sum in place on a kept product": (_sum_in_place, fsdp(2, **TP2, **SELECTIVE)),
    "weight decay by the shape of a shard (ZeRO 3)": (_decay_by_shape, modern(zero(3, 2))),
}


def is_caught(name: str) -> bool:
    """Whether a short run with the bug is out of tolerance; without it, the cell of the same layout is within."""
    bug, trial = BUGS[name]
    trial = replace(trial, steps=5)
    return bool(differences(trial, bug).faults(trial.precision))
