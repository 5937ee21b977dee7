"""Counts the bytes of tensors as they come and go: the most that a piece of work held at any moment."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StoragePeak(TorchDispatchMode):
    """As a context: `live` and `peak` bytes of storages made inside it, on any device but meta."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, DTensor):
                leaf = leaf._local_tensor  # the wrapper's own storage has the size of the whole, and no memory
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if self._known.get(key) == size:
            return
        if key not in self._known:
            weakref.finalize(storage, self._forget, key)
        self.live += size - self._known.get(key, 0)
        self._known[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)
