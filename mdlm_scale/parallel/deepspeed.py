"""DeepSpeed's ZeRO, stages 0 to 3, its only door.

Stage 0 shards nothing: DeepSpeed runs the passes and adds up the gradients, the update is ours. From stage 1 on the
update is DeepSpeed's, and its masters are flat: this rank's part of all parameters in a row (1, 2) or a part of each
(3). DeepSpeed offers no way to these parts, nor to judge a norm before the update: the private names used for that are
listed in NAMES and looked for at the start. Its silent failures are met here: gradients are sums at every stage, Adam's
state exists from the first moment, and no gathered copy of a weight outlives a change of its master.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would find out by itself, with a warning

import deepspeed
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import safe_get_full_grad, safe_get_local_fp32_param, safe_get_local_optimizer_state
from pydantic import ValidationError
from torch import Tensor, nn

from mdlm_scale.config import BatchConfig, ParallelConfig, Precision
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.errors import ConfigError
from mdlm_scale.kernels import HALF, set_adam_step
from mdlm_scale.layout import Layout
from mdlm_scale.parallel import zero_json
from mdlm_scale.parallel.engine import Judge, Parts, Shard, Update, swap
from mdlm_scale.parallel.groups import Groups, Over
from mdlm_scale.parallel.plain import PlainEngine
from mdlm_scale.parallel.zero_json import KNOWN_VERSION

# what is used of DeepSpeed beyond its documentation, by class
NAMES = {
    "DeepSpeedEngine": ("buffered_allreduce_fallback", "empty_partition_cache", "no_sync", "micro_steps"),
    "DeepSpeedZeroOptimizer": ("scaled_global_norm", "update_lp_params", "_lazy_init_hp_params_optimizer_state"),
    "BF16_Optimizer": (
        "get_grads_for_norm", "clear_hp_grads", "clear_lp_grads", "update_lp_params",
        "_lazy_init_hp_params_optimizer_state",
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        "_get_norm_groups", "fp32_partitioned_groups_flat", "persistent_parameters",
        "_reassign_or_swap_out_partitioned_parameters",
    ),
}  # fmt: skip


class Zero0Engine(PlainEngine):
    """Every rank holds the whole model; DeepSpeed runs the passes and sums the gradients over the ranks."""

    def __init__(
        self, parts: Parts, config: ParallelConfig, batch: BatchConfig, layout: Layout, groups: Groups
    ) -> None:
        super().__init__(parts, sum_ranks=lambda squares: groups.sum([squares], over=Over.tp)[0])
        _start_deepspeed()
        # DeepSpeed is not told of half precision: it would keep masters of its own, and add up in half precision
        written = zero_json.settings(
            config, batch, layout, Precision.float32, max_norm=0.0, num_parameters=_num_parameters(parts.model)
        )
        self.engine, _ = _initialize(parts.model, self.optimizer, written, groups)
        _check_names(self.engine)
        self.model = self.engine

    def forward_backward(self, batches: Sequence[Batch], denominator: float) -> list[Tensor]:
        with self.engine.no_sync():
            nlls = super().forward_backward(batches, denominator)
        gradients = self.gradients()
        self.cut.sum_partial(gradients)
        self.engine.buffered_allreduce_fallback(grads=list(gradients.values()))
        return nlls

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)


class ZeroEngine:
    """Stages 1 to 3."""

    def __init__(
        self, parts: Parts, config: ParallelConfig, batch: BatchConfig, layout: Layout, groups: Groups
    ) -> None:
        """At stage 3 no rank ever holds the whole model."""
        _start_deepspeed()
        model = parts.model.to(parts.dtype)
        self.device, self.cut = parts.device, parts.cut
        self.stage = config.zero_stage
        # stage 3 only averages; at the other stages gradients are summed by a setting
        self.loss_scale = layout.dp_size if self.stage == 3 else 1
        precision = Precision.bf16 if parts.dtype in HALF else Precision.float32
        written = zero_json.settings(config, batch, layout, precision, parts.max_norm, _num_parameters(model))
        if self.stage == 3:
            _partition(model, written, self.device, groups)
            blocks: Any = model.blocks
            deepspeed.utils.set_z3_leaf_modules(model, [type(blocks[0])])  # a block is gathered at once, as by FSDP
        else:
            model.to_empty(device=self.device)
        self.weights: dict[str, Any] = dict(model.named_parameters())  # with DeepSpeed's attributes
        for name, weight in self.weights.items():
            weight.tensor_model_parallel = self.cut.places[name].is_cut  # else its norm is counted on one rank alone
        self.cut.sum_partial_in_backward(self.weights)
        optimizer = parts.make_optimizer(self.weights)
        self.engine, self.optimizer = _initialize(model, optimizer, written, groups)
        _check_names(self.engine, self.optimizer)
        _check_names(*self.weights.values(), names=("ds_shape", "ds_numel") if self.stage == 3 else ("_hp_mapping",))
        self._shards = self._make_shards(layout)
        with torch.no_grad():
            for name, shard in self._shards.items():
                shard.master.copy_(parts.init_range(name, shard.start, shard.master.numel()))
        self._push()

    def forward(self, batch: Batch) -> Tensor:
        self.engine.eval()
        with torch.no_grad():
            nll_M = self.engine(batch.to(self.device))[1]
        self.engine.train()
        return nll_M

    def forward_backward(self, batches: Sequence[Batch], denominator: float) -> list[Tensor]:
        nlls = []
        expected = self.engine.gradient_accumulation_steps()  # DeepSpeed reduces and updates when it has counted these
        assert len(batches) == expected, f"{len(batches)} micro-batches, but DeepSpeed was told {expected}"
        for i, batch in enumerate(batches, start=1):
            loss_sum, nll_M = self.engine(batch.to(self.device))
            self.engine.backward(loss_sum * (self.loss_scale / denominator), scale_wrt_gas=False)
            nlls.append(nll_M)
            if i < len(batches):
                self.engine.step()  # only counts the micro-batch
        return nlls

    def step(self, judge: Judge, lr: float) -> Update:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        verdict = _Verdict(judge)
        if _is_bf16_optimizer(self.optimizer):
            gradients, _ = self.optimizer.get_grads_for_norm()
            norm = deepspeed.runtime.utils.get_global_norm_of_tensors(gradients, mpu=self.engine.mpu)
            if verdict.refuses(float(norm)):
                self.optimizer.clear_hp_grads()
                self.optimizer.clear_lp_grads()
                self.engine.micro_steps += 1
                return Update(verdict.norm, applied=False)
            self.engine.step()
        else:
            with verdict.inside(self.optimizer):
                self.engine.step()
        assert self.engine.was_step_applied() == verdict.applied, (
            f"DeepSpeed {'applied' if self.engine.was_step_applied() else 'skipped'} a step with norm {verdict.norm}"
        )
        return Update(verdict.norm, verdict.applied)

    def shards(self) -> dict[str, Shard]:
        return self._shards

    def loaded(self, updates: int) -> None:
        set_adam_step(_base(self.optimizer), self._flats(), updates)
        self._push()

    def exchange(self, flats: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, shard in self._shards.items():
                swap(shard.master, flats[name])
        self._push()

    def full_gradient(self, name: str) -> Tensor:
        return self.cut.joined(name, safe_get_full_grad(self.weights[name]))

    def full_parameter(self, name: str) -> Tensor:
        weight = self.weights[name]
        with deepspeed.zero.GatheredParameters([weight], enabled=self.stage == 3):
            return self.cut.joined(name, weight.detach().clone())

    def _flats(self) -> list[Tensor]:
        """What Adam updates: this rank's flat partitions."""
        if self.stage == 3:
            return self.optimizer.fp32_partitioned_groups_flat
        return [flat for group in _base(self.optimizer).param_groups for flat in group["params"]]

    def _make_shards(self, layout: Layout) -> dict[str, Shard]:
        set_adam_step(_base(self.optimizer), self._flats(), 0)  # later, ZeRO would not find it for all groups
        shards = {}
        if self.stage < 3:
            self.optimizer._lazy_init_hp_params_optimizer_state()
        for name, weight in self.weights.items():
            if self.stage == 3:
                moments = [safe_get_local_optimizer_state(weight, key) for key in ("exp_avg", "exp_avg_sq")]
                parts = [part.detach().view(-1) for part in (safe_get_local_fp32_param(weight), *moments)]
                start = layout.dp_rank * len(parts[0])
                here = max(0, min(len(parts[0]), weight.ds_numel - start))  # the rest of the last part is padding
                master, exp_avg, exp_avg_sq = (part[:here] for part in parts)
                shards[name] = Shard(master, exp_avg, exp_avg_sq, start, self.cut.places[name])
            elif (mapping := weight._hp_mapping) is not None:
                moments = mapping.optim_fragment
                start = mapping.lp_fragment_address.start
                master = mapping.hp_fragment.detach()
                shards[name] = Shard(master, moments["exp_avg"], moments["exp_avg_sq"], start, self.cut.places[name])
        return shards

    def _push(self) -> None:
        """Masters to the weights of the forward pass, on all ranks."""
        if self.stage < 3:
            self.optimizer.update_lp_params()
            return
        self.engine.empty_partition_cache()  # gathered copies of the old weights would stay in use
        for i in range(len(self.optimizer.fp32_partitioned_groups_flat)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(i)
        if kept := self.optimizer.persistent_parameters:
            kept[0].all_gather(kept)


class _Verdict:
    """The judge's word on a norm, asked inside DeepSpeed's step; a negative norm there makes it discard the step."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.norm = math.inf  # DeepSpeed ends a step with an overflow before there is a norm
        self.applied = False

    def refuses(self, norm: float) -> bool:
        self.norm = norm if norm >= 0 else math.nan  # DeepSpeed says -1 of what is not finite
        self.applied = self.judge(self.norm)
        return not self.applied

    def inside(self, optimizer: Any) -> AbstractContextManager[None]:
        if hasattr(optimizer, "scaled_global_norm"):
            norm_of = optimizer.scaled_global_norm

            def judged_norm(*args: Any) -> Tensor:
                norm = norm_of(*args)
                return torch.full_like(norm, -1.0) if self.refuses(float(norm)) else norm

            return _replaced(optimizer, "scaled_global_norm", judged_norm)
        norms_of = optimizer._get_norm_groups

        def judged_norms() -> list[Tensor]:
            norms = [torch.as_tensor(norm) for norm in norms_of()]
            whole = torch.stack([norm.double() for norm in norms]).norm() if min(norms) >= 0 else -1.0
            return [torch.full_like(norm, -1.0) for norm in norms] if self.refuses(float(whole)) else norms

        return _replaced(optimizer, "_get_norm_groups", judged_norms)


@contextmanager
def _replaced(owner: Any, name: str, method: Any) -> Iterator[None]:
    """An object's method, replaced for a while."""
    setattr(owner, name, method)
    try:
        yield
    finally:
        delattr(owner, name)  # the class's own shows again


def faults(config: ParallelConfig, batch: BatchConfig, layout: Layout | None, precision: Precision) -> list[str]:
    """What is wrong with the deepspeed engine's settings; without a layout, only what does not depend on it."""
    found = zero_json.faults(config, batch, layout, precision)
    if layout is None or config.zero_stage not in range(4):
        return found
    try:
        DeepSpeedZeroConfig(**{"stage": config.zero_stage} | config.deepspeed.get("zero_optimization", {}))
    except ValidationError as error:
        place = ("parallel.deepspeed.zero_optimization",)
        found += [f"{'.'.join(map(str, place + e['loc']))}: {e['msg'].rstrip('.')}." for e in error.errors()]
    except (TypeError, ValueError):
        pass  # no pairs of keys and values, which is among the faults already
    return found


def _start_deepspeed() -> None:
    """Let DeepSpeed use the process groups that exist, quietly."""
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_no_overflow)
    if not torch.cuda.is_available():
        # a collective through shared memory would be compiled at the first use, and is not ours to test
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)


def _mpu(groups: Groups) -> SimpleNamespace | None:
    """What DeepSpeed asks about groups; without it, it silently takes tensor-parallel ranks for data-parallel ones."""
    answers: dict[str, Any] = {}
    for kind, group in {"model": groups.tp, "tensor_model": groups.tp, "data": groups.dp}.items():
        if group is None:
            return None
        answers[f"get_{kind}_parallel_group"] = lambda group=group: group
        answers[f"get_{kind}_parallel_rank"] = group.rank
        answers[f"get_{kind}_parallel_world_size"] = group.size
    return SimpleNamespace(**answers)


def _initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, written: dict[str, Any], groups: Groups
) -> tuple[Any, Any]:
    try:
        engine, wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=written, mpu=_mpu(groups))
    except ValidationError as error:
        raise ConfigError(f"parallel.deepspeed is refused by DeepSpeed {deepspeed.__version__}: {error}") from error
    return engine, wrapped


def _is_no_overflow(record: logging.LogRecord) -> bool:
    """It calls every refused step an overflow; the loop tells the reason."""
    return "OVERFLOW" not in record.getMessage()


def _partition(model: nn.Module, written: dict[str, Any], device: torch.device, groups: Groups) -> None:
    """Make the weights one module at a time, each cut to this rank's part before the next is made."""
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
            deepspeed.zero.Init(
                module=module, config_dict_or_path=written, data_parallel_group=groups.dp, mpu=_mpu(groups)
            )


def _num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _base(optimizer: Any) -> torch.optim.Optimizer:
    """Our optimizer, inside DeepSpeed's."""
    return optimizer.optimizer


def _is_bf16_optimizer(optimizer: Any) -> bool:
    """DeepSpeed's choice for stage 1 in bf16 with float32 sums."""
    return type(optimizer).__name__ == "BF16_Optimizer"


def _check_names(*objects: Any, names: tuple[str, ...] | None = None) -> None:
    """One clear error if this DeepSpeed lacks a private name that is needed; by default those of NAMES."""
    missing: dict[str, None] = {}  # in order, each once
    for thing in objects:
        kind = type(thing).__name__
        needed = names or NAMES.get(kind)
        if needed is None:
            missing[f"known class in the place of {kind}"] = None
        missing |= {f"{kind}.{name}": None for name in needed or () if not hasattr(thing, name)}
    if missing:
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} has no {', '.join(missing)}, which mdlm_scale needs. Version "
            f"{KNOWN_VERSION} is known to work: pip install deepspeed=={KNOWN_VERSION}"
        )
