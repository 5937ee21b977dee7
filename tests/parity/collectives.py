"""Counts what ranks send each other: every collective that this process starts, by kind, group and bytes."""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# names of torch's operators, by what they do
KINDS = {
    "allreduce_": "all-reduce", "allreduce_coalesced_": "all-reduce",
    "allgather_": "all-gather", "_allgather_base_": "all-gather", "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter", "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_": "reduce", "broadcast_": "broadcast", "gather_": "gather", "scatter_": "scatter",
    "alltoall_": "all-to-all", "alltoall_base_": "all-to-all", "send": "send", "recv_": "receive",
    "barrier": "barrier",
}  # fmt: skip
FEW = 32  # numbers of a sum that is no tensor of the model


class Collectives(TorchDispatchMode):
    """As a context: `count` and `bytes` by (group, kind).

    The bytes are those of the whole tensor: what an all-gather makes, what a reduce-scatter starts from. Sums of a few
    numbers (losses, norms, flags) are a kind of their own. An operator of the process groups that is not known here is
    an error: all are counted.
    """

    def __init__(self, groups: dict[str, dist.ProcessGroup | list[int] | None]) -> None:
        """`groups`, or their ranks, by the name to count them under; others are counted under their ranks."""
        super().__init__()
        ranks = {n: g if isinstance(g, list) else dist.get_process_group_ranks(g) for n, g in groups.items()}
        self.names = {tuple(each): name for name, each in ranks.items()}
        self.count: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.partition(".")[0]
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if type(arg).__name__ == "ScriptObject")
            ranks = tuple(dist.get_process_group_ranks(group))
            numel, size = max((_size(arg) for arg in args if isinstance(arg, Tensor | list)), default=(0, 0))
            is_few = KINDS[name] == "all-reduce" and numel < FEW
            key = self.names.get(ranks, str(ranks)), "numbers" if is_few else KINDS[name]
            self.count[key] += 1
            self.bytes[key] += size
        return func(*args, **(kwargs or {}))


def _size(tensors: Any) -> tuple[int, int]:
    """Elements and bytes."""
    leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
