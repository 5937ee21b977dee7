"""What a rank holds at the moments of a step that need most: its state, what the passes keep, the engine's buffers.

The passes are traced (`trace.py`). What an engine gathers, has not yet reduced, or copies at the end of a step is told
here for each, as it was counted on real ranks. The peak is the largest of these moments.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mdlm_scale.config import EngineName
from mdlm_scale.parallel.trace import Trace
from mdlm_scale.parallel.traffic import Work, gathered_at_most, persistence_threshold

PREFETCH, FLAT_SUM = 50_000_000, 500_000_000  # elements; DeepSpeed's defaults

Moment = dict[str, int]  # bytes by kind


@dataclass(frozen=True)
class Buffers:
    """What an engine holds beyond its state, in bytes."""

    earlier: int  # gradients of the micro-batches before
    weights: int = 0  # gathered
    gathering: int = 0  # the same once more, on their way; not during the head's pass
    head: int = 0  # gradients not yet reduced, and what they are reduced from: after the head's backward pass,
    block: int = 0  # beyond that after a block's,
    before: int = 0  # beyond that of the block before;
    rest: int = 0  # after the backward pass of all blocks, beside `before`
    update: int = 0  # copies for the update


def moments(work: Work, state: Mapping[str, int], trace: Trace) -> dict[str, Moment]:
    """By name of the moment; `state` as `Sizes.state_bytes` tells it."""
    own, layers = _buffers(work, _Units.of(work), state["gradients"]), work.model.num_layers
    standing = {kind: size for kind, size in state.items() if kind != "gradients"}

    def moment(gradients: int, buffers: int, kept: int, **passing: int) -> Moment:
        return {**standing, "gradients": gradients, "buffers": buffers, "activations": kept, **passing}

    last, one, two = (trace.kept * max(0, layers - done) // layers for done in (0, 1, 2))
    weights = own.weights + own.gathering
    unreduced = weights + own.head + own.block
    return {
        "head": moment(own.earlier, own.weights, last, **{"in head": trace.in_head}),
        "in last block": moment(own.earlier, weights + own.head, last, **{"in block": trace.in_block}),
        "behind it": moment(own.earlier, unreduced, one),
        "one further": moment(own.earlier, unreduced + own.before, two),
        "end of backward": moment(max(own.earlier, state["gradients"]), weights + own.rest + own.before, 0),
        "update": moment(state["gradients"], own.update, 0),
    }


@dataclass(frozen=True)
class _Units:
    """Elements of what is gathered and reduced together."""

    whole: int
    block: int  # one of the blocks
    rest: int  # all that is in none of them
    head: int

    @classmethod
    def of(cls, work: Work) -> "_Units":
        numel = {name: place.shape.numel() for name, place in work.places.items()}
        whole, head = sum(numel.values()), sum(n for name, n in numel.items() if name.startswith("head."))
        in_blocks = sum(n for name, n in numel.items() if name.startswith("blocks."))
        return cls(whole, in_blocks // work.model.num_layers, whole - in_blocks, head)


def _buffers(work: Work, units: _Units, gradients: int) -> Buffers:
    """`gradients` are those of the state."""
    parallel, narrow, wide = work.parallel, work.weight_bytes, work.wide_bytes
    earlier = gradients if len(work.rows) > 1 else 0
    if parallel.engine is EngineName.fsdp:
        both = narrow + wide  # a unit's gradients, and the buffer that they are reduced from until the next one's is
        return Buffers(
            earlier,
            weights=narrow * (units.rest + 2 * units.block if parallel.reshard_after_forward else units.whole),
            head=units.head * narrow, block=units.block * both, before=units.block * wide, rest=units.rest * both,
        )  # fmt: skip
    if parallel.engine is EngineName.plain or parallel.zero_stage == 0:
        is_summed = parallel.engine is EngineName.deepspeed and work.layout.dp_size > 1
        update = min(units.whole, FLAT_SUM) * wide if is_summed else 0
        if narrow < wide:  # the masters' gradients are made of these, at the end of a micro-batch
            rest = units.whole * narrow - (gradients - earlier)
            return Buffers(earlier, head=units.head * narrow, block=units.block * narrow, rest=rest, update=update)
        if earlier:  # each is added to those as it is made
            return Buffers(earlier, update=update)
        return Buffers(0, head=units.head * narrow, block=units.block * narrow, update=update)
    return _ZERO[parallel.zero_stage](work, units, gradients, earlier)


def _zero1(work: Work, units: _Units, gradients: int, earlier: int) -> Buffers:
    head, block = units.head * work.weight_bytes, units.block * work.weight_bytes
    if work.weight_bytes < work.wide_bytes:  # float32 sums are there from the start
        return Buffers(max(earlier, units.whole * work.wide_bytes), head=head, block=block)
    update = (units.whole // work.layout.shard_size + _bucket(units)) * work.wide_bytes
    return Buffers(earlier, head=head, block=block, update=update)


def _zero2(work: Work, units: _Units, gradients: int, earlier: int) -> Buffers:
    narrow, wide = work.weight_bytes, work.wide_bytes
    share, flat = units.whole // work.layout.shard_size, _bucket(units) * narrow
    # the part of this micro-batch, before it is added to the sum; float32 sums beside bf16 are there from the start
    part = share * (wide if narrow == wide else narrow if earlier else 0)
    return Buffers(
        gradients if narrow < wide else earlier,
        head=flat + part, block=units.block * narrow, rest=flat, update=share * wide,
    )  # fmt: skip


def _zero3(work: Work, units: _Units, gradients: int, earlier: int) -> Buffers:
    threshold, narrow = persistence_threshold(work.parallel), work.weight_bytes
    small = sum(n for place in work.places.values() if (n := place.shape.numel()) < threshold)  # stay whole
    return Buffers(
        gradients,
        weights=narrow * (small + min(units.whole - small, gathered_at_most(work.parallel))),
        gathering=narrow * min(units.whole - small, PREFETCH + units.block),  # together, then copied apart
        block=_bucket(units) * narrow, rest=2 * _bucket(units) * narrow, update=small * narrow,
    )  # fmt: skip


_ZERO = {1: _zero1, 2: _zero2, 3: _zero3}


def _bucket(units: _Units) -> int:
    """As `zero_json` tells DeepSpeed."""
    return max(1, units.whole // 20)
