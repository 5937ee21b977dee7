"""Tensor parallelism: the matrices of the model cut over the ranks of a group, by a plan that is data.

The model is built whole (on the meta device) and knows nothing of this; here its linears and its embedding are replaced
by megatron-core's, whose only door this is. A block's two pairs of matrices are cut by rows of the weight, then by
columns, so that a pair needs one sum; attention runs on this rank's heads. The vocabulary is cut by rows, padded to a
multiple of the ranks; the loss over it is ours (`model/head.py`), with the exchange of its sums from here.
"""

import warnings
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

with warnings.catch_warnings():  # of packages that it can do without
    warnings.simplefilter("ignore")
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

if not torch.cuda.is_available():  # advice for GPUs, at the first backward pass
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")

from mdlm_scale.config import DataConfig, ModelConfig, ParallelConfig
from mdlm_scale.model.dit import Block, DiT, Linear, Norm, mlp_width, num_kv_heads
from mdlm_scale.model.head import Combined, VocabShard
from mdlm_scale.parallel import sequence
from mdlm_scale.parallel.cut import Cut, Place

# the dimension in which a parameter is cut; every parameter that is not here is on all ranks: norms, adaLN and the
# time embedding are small, and a sum for each would cost more than what it saves
PLAN = {
    "embed.weight": 0,
    "blocks.*.qkv.weight": 0,  # rows ordered by group of heads: a slice is some groups
    "blocks.*.norm_qk.weight": 0,
    "blocks.*.attn_out.weight": 1,
    "blocks.*.mlp_in.weight": 0,
    "blocks.*.mlp_in.bias": 0,
    "blocks.*.mlp_out.weight": 1,
    "head.weight": 0,
    "head.bias": 0,
}


def place(name: str, whole: torch.Size, rank: int, size: int) -> Place:
    """What of a parameter is on a rank of a group of `size`."""
    dim = next((dim for pattern, dim in PLAN.items() if fnmatch(name, pattern)), None)
    return Place(whole) if dim is None else Place(whole, dim, rank, size)


def cut(model: DiT, group: dist.ProcessGroup, sequence_parallel: bool) -> Cut:
    """Replace what the plan names by this rank's part; the model is on the meta device, and stays there."""
    size, rank = group.size(), group.rank()
    places = {name: place(name, p.shape, rank, size) for name, p in model.named_parameters()}
    with torch.device("meta"):
        model.embed = _Embedding(places["embed.weight"], group, sequence_parallel)
        for i, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            block.num_kv_heads //= size
            if block.is_modern:
                block.norm_qk.weight = nn.Parameter(torch.empty(places[f"blocks.{i}.norm_qk.weight"].shape))
            block.position_slice = rank if sequence_parallel else 0
            for name in ("qkv", "mlp_in"):
                setattr(block, name, _Column(getattr(block, name), group, sequence_parallel))
            for name in ("attn_out", "mlp_out"):
                setattr(block, name, _Row(getattr(block, name), group, sequence_parallel))
        if sequence_parallel:
            model.norm = _JoinedNorm(model.norm, group)
        head, own = model.head, places["head.weight"]
        head.weight, head.bias = nn.Parameter(torch.empty(own.shape)), nn.Parameter(torch.empty(own.shape[0]))
    head.shard = vocab_shard(own, group, sequence_parallel)
    found = {name: p.shape for name, p in model.named_parameters()}
    assert found == {name: p.shape for name, p in places.items()}, f"the plan says {places}, the layers made {found}"
    return Cut(places, size, group, sequence_parallel)


def vocab_shard(own: Place, group: dist.ProcessGroup, sequence_parallel: bool) -> VocabShard:
    """The part of the vocabulary that `own` is, and how its sums meet the others'."""
    return VocabShard(
        start=own.offset[0],
        num_valid=max(0, min(own.shape[0], own.whole[0] - own.offset[0])),
        combine=partial(_combine, group),
        # with sequence parallelism the gradient of the joined norm is a sum already
        sum_hidden=(lambda d_MD: d_MD) if sequence_parallel else partial(_summed, group),
    )


def faults(parallel: ParallelConfig, model: ModelConfig, data: DataConfig) -> list[str]:
    """What is wrong with cutting this model."""
    size, found = parallel.tp_size, []
    groups, inside = num_kv_heads(model), mlp_width(model)
    if groups % size or inside % size:
        heads = "num_heads" if model.num_kv_heads is None else "num_kv_heads"
        what = f"model.{heads}={groups}, and a head is not cut" if groups % size else f"{inside}, the width of the MLP"
        fitting = ", ".join(str(n) for n in range(1, groups + 1) if groups % n == 0 and inside % n == 0)
        found.append(f"parallel.tp_size={size} does not divide {what}. These do: {fitting}.")
    if parallel.sequence_parallel and data.length % size:
        below = data.length // size * size
        near = " or ".join(str(n) for n in (below, below + size) if n)
        found.append(
            f"data.length={data.length} is not a multiple of parallel.tp_size={size}, so that "
            f"parallel.sequence_parallel cannot deal the positions evenly. Nearest that work: {near}; or switch it off."
        )
    return found


class _Column(ColumnParallelLinear):
    """A matrix of which this rank has some rows of the weight, that is some outputs."""

    def __init__(self, linear: Linear, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__(
            linear.in_features, linear.out_features, config=_settings(group), init_method=None,
            bias=linear.bias is not None, disable_grad_reduce=sequence_parallel, tp_group=group,
        )  # fmt: skip

    @torch.compiler.disable
    def forward(self, x_BLD: Tensor) -> Tensor:
        return super().forward(x_BLD.to(self.weight.dtype))[0]

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **options: object) -> Tensor:
        if not self.disable_grad_reduce:
            return super()._forward_impl(input, weight, bias=bias, **options)
        # megatron's own joins along the first dimension, into a buffer on a GPU
        return sequence.joined_linear(input, weight, bias, self.tp_group)


class _Row(RowParallelLinear):
    """A matrix of which this rank has some columns of the weight, that is some inputs: outputs are added up."""

    def __init__(self, linear: Linear, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__(
            linear.in_features, linear.out_features, config=_settings(group), init_method=None,
            bias=linear.bias is not None, input_is_parallel=True, skip_bias_add=True, tp_group=group,
        )  # fmt: skip
        self.is_sliced = sequence_parallel
        # megatron's word for: the sum is left to us. Its own works in place, on a product that selective recomputation
        # keeps, and would be added to it a second time
        self.explicit_expert_comm = True

    @torch.compiler.disable
    def forward(self, x_BLD: Tensor) -> Tensor:
        y_BLD, bias_D = super().forward(x_BLD.to(self.weight.dtype))
        y_BLD = (sequence.summed_slice if self.is_sliced else _Sum.apply)(y_BLD, self.tp_group)
        return y_BLD if bias_D is None else y_BLD + bias_D


class _Sum(torch.autograd.Function):
    """The sum over the ranks; its gradient is the same on all of them, and that of each summand."""

    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(group, x_BLD.clone())

    @staticmethod
    def backward(ctx: Any, d_BLD: Tensor) -> tuple[Tensor, None]:
        return d_BLD, None


class _Embedding(VocabParallelEmbedding):
    """An embedding of which this rank has some tokens; the others' are zero here, and the ranks' are added up."""

    def __init__(self, own: Place, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        padded = own.shape[0] * group.size()
        super().__init__(padded, own.shape[1], init_method=None, config=_settings(group), tp_group=group)
        self.is_sliced = sequence_parallel

    def forward(self, z_BL: Tensor) -> Tensor:
        x_BLD = super().forward(z_BL)
        return sequence.slice_of_equal(x_BLD, self.tp_group) if self.is_sliced else x_BLD


class _JoinedNorm(Norm):
    """The norm before the head, whose rows may be of any position."""

    def __init__(self, norm: Norm, group: dist.ProcessGroup) -> None:
        super().__init__(len(norm.weight), norm.block)
        self.group = group

    def forward(self, x_BSD: Tensor, shift_B1D: Tensor, scale_B1D: Tensor) -> Tensor:
        return sequence.joined(super().forward(x_BSD, shift_B1D, scale_B1D).to(self.weight.dtype), self.group)


def _settings(group: dist.ProcessGroup) -> ModelParallelConfig:
    """Sizes only: weights are made by the engines, and their dtype is the engines' choice."""
    return ModelParallelConfig(
        tensor_model_parallel_size=group.size(), use_cpu_initialization=True, perform_initialization=False
    )


def _combine(group: dist.ProcessGroup, max_R: Tensor, sum_R: Tensor, target_R: Tensor) -> Combined:
    """Start the one exchange of a chunk of rows; the function waits and puts the softmax's sums together."""
    own_3R = torch.stack((max_R, sum_R, target_R))
    all_T3R = own_3R.new_empty(group.size() * 3, len(max_R))
    work = sequence.all_gather(all_T3R, own_3R, group=group, async_op=True)

    def combined() -> tuple[Tensor, Tensor, Tensor]:
        work.wait()
        max_TR, sum_TR, target_TR = all_T3R.view(-1, 3, len(max_R)).unbind(1)
        most_R = max_TR.amax(0)
        return most_R, (sum_TR * (max_TR - most_R).exp()).sum(0), target_TR.sum(0)

    return combined


def _summed(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Added up over the ranks, in place."""
    dist.all_reduce(x, group=group)
    return x
