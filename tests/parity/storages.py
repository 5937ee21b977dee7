"""Counts the bytes of tensors as they come and go: the most that a piece of work held at any moment."""

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StoragePeak(TorchDispatchMode):
    """As a context: the most bytes that storages made inside it had at any operation, on any device but meta. They are
    asked each time, for engines empty and fill them behind everybody's back."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, weakref.ref[UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, DTensor):
                leaf = leaf._local_tensor  # the wrapper's own storage has the size of the whole, and no memory
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                self._known[storage._cdata] = weakref.ref(storage)
        alive = {key: storage for key, ref in self._known.items() if (storage := ref()) is not None}
        self._known = {key: self._known[key] for key in alive}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive.values()))
        return out
