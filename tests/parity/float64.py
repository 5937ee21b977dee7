"""DeepSpeed in float64, for tests alone: it lowers masters, sums and norms to float32 wherever nothing forbids it.

With these places changed its stages can be held to one process at 1e-12, which shows that what remains in float32 is
rounding and nothing else.
"""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.utils import mixed_precision_linkage
from torch import Tensor

WIDE = torch.float64


def widen_deepspeed() -> None:
    """For the rest of this process."""
    engine = engine_module.DeepSpeedEngine
    data_types, to_float = engine.get_data_types, Tensor.float

    def get_data_types(self: Any) -> tuple[torch.dtype, torch.dtype]:
        return (WIDE, WIDE) if self.zero_optimization() else data_types(self)

    def keep_wide(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if self.dtype == WIDE else to_float(self, *args, **kwargs)

    engine.get_data_types = get_data_types
    engine.communication_data_type = property(lambda self: WIDE, lambda self, value: None)
    ZeROOptimizer._configure_master_weights = _wide_masters(ZeROOptimizer._configure_master_weights)
    Tensor.float = keep_wide  # type: ignore[method-assign]
    accelerator = type(deepspeed.accelerator.get_accelerator())
    accelerator.supported_dtypes = lambda self: [torch.bfloat16, torch.float32, WIDE]
    mixed_precision_linkage.get_full_hp_grad = _full_gradient


def _wide_masters(configure: Any) -> Any:
    def configured(self: Any, **kwargs: Any) -> torch.dtype:
        configure(self, **kwargs)
        return WIDE

    return configured


def _full_gradient(weight: Any) -> Tensor:
    """Stages 1 and 2 gather gradients through a float32 buffer; the same without it."""
    whole = torch.zeros_like(weight).flatten()
    if (mapping := weight._hp_mapping) is not None:
        part, at = mapping.get_lp_grad_fragment(weight._index_in_param_group).flatten(), mapping.lp_fragment_address
        here = slice(at.start, at.start + at.numel)
        whole[here] = part[here] if len(part) == len(whole) else part
    dist.all_reduce(whole, group=weight._dp_group)
    return whole.view_as(weight)
