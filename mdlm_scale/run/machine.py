"""How long a machine takes: for operations, for exchanges between ranks, for the update. Its numbers are data.

The model is a roofline with efficiencies: an operation takes as long as its arithmetic or its bytes do, whichever is
longer; ranks in a ring send at the rate of the slowest link on the way.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mdlm_scale import config as config_module
from mdlm_scale.config import Precision
from mdlm_scale.errors import ConfigError, raise_if_any
from mdlm_scale.parallel.trace import Operation
from mdlm_scale.parallel.traffic import Traffic, sent_bytes

FILE = Path(__file__).resolve().parents[2] / "configs" / "plan" / "gpus.yaml"
UPDATE_PASSES = 13  # times that the update reads or writes 4 bytes a parameter: norm, clipping, AdamW, average


@dataclass(frozen=True)
class Machine:
    """configs/plan/gpus.yaml says what each number is."""

    tflops_bf16: float = 0.0
    tflops_float32: float = 0.0
    memory_gb: float = 0.0
    memory_gbps: float = 0.0
    per_node: int = 0
    node_gbps: float = 0.0
    network_gbps: float = 0.0
    usable: float = 0.0
    product: float = 0.0
    attention: float = 0.0
    rest: float = 0.0
    links: float = 0.0
    hidden: float = 0.0
    fused: float = 0.0
    operation_us: float = 0.0
    exchange_us: float = 0.0
    is_cpu: bool = False

    @property
    def usable_bytes(self) -> float:
        return self.usable * self.memory_gb * 1e9

    def peak_flops(self, precision: Precision) -> float:
        """Of float64 nothing is known: half of float32's."""
        tflops = {Precision.bf16: self.tflops_bf16, Precision.float32: self.tflops_float32}
        return 1e12 * tflops.get(precision, self.tflops_float32 / 2)

    def seconds(self, operations: Mapping[Operation, int], precision: Precision, compiled: bool) -> dict[str, float]:
        """Of these operations, by kind."""
        found = dict.fromkeys(("product", "attention", "rest"), 0.0)
        bandwidth = 1e9 * self.memory_gbps * self.rest
        rate = {kind: self.peak_flops(precision) * getattr(self, kind) for kind in ("product", "attention")}
        for each, count in operations.items():
            arithmetic = each.flops / rate[each.kind] if each.flops else 0.0
            one = max(arithmetic, each.bytes / bandwidth, self.operation_us / 1e6)
            found[each.kind] += count * one * (self.fused if compiled and each.kind == "rest" else 1.0)
        return found

    def exchange_seconds(self, kind: str, traffic: Traffic, size: int, stride: int) -> float:
        """Of one kind of collective over groups of `size` ranks that stand `stride` apart."""
        sent = sent_bytes({("", kind): traffic}, "", size)
        latency = (traffic.count or 1) * self.exchange_us / 1e6 * math.ceil(math.log2(size))
        return latency + sent / (1e9 * self.links * self.bandwidth(size, stride))

    def bandwidth(self, size: int, stride: int) -> float:
        """Bytes a second of a rank, in 1e9. Rings over nodes use the network of all their ranks there."""
        on_node = max(1, min(size, self.per_node // stride))
        return self.node_gbps if on_node == size else min(self.node_gbps, on_node * self.network_gbps)

    def update_seconds(self, num_parameters: int) -> float:
        return 4 * UPDATE_PASSES * num_parameters / (1e9 * self.memory_gbps * self.rest)


def load(name: str) -> Machine:
    machines = config_module.entries(FILE, Machine)
    if name not in machines:
        raise ConfigError(
            f"--gpu {name} is not known. Known are {', '.join(machines)}; a new one is an entry of its own in {FILE}."
        )
    found: Machine = machines[name]
    numbers = [key for key in Machine.__dataclass_fields__ if key != "is_cpu"]
    raise_if_any(f"{FILE}: {f}" for f in config_module.outside(name, found, numbers, lambda n: n > 0, "be above 0"))
    return found
