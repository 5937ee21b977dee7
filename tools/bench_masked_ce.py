"""The head and its loss, forward and backward: ours against the usual ways, in seconds, share of the limit and memory.

    python tools/bench_masked_ce.py                                          8192 tokens, d 768, V 50258, half masked
    python tools/bench_masked_ce.py --tokens 2048 --threads 1 --json ce.json
    python tools/bench_masked_ce.py --tp 2                                   the vocabulary cut over two ranks

original    all rows through the projection, log-softmax over the vocabulary, gather: the formula of the released code
gather      masked rows only, then F.cross_entropy
compiled    torch.compile of that
ours        model/head.py: masked rows, loss and gradients in one pass over row chunks

Every variant runs in a process of its own on the same inputs; around each repetition the rate of square matrix products
is measured. The limit is 6 * M * D * V operations at that rate, M being the masked rows; the peak is what the variant
needs beyond weights, hidden rows and targets, its gradients included. Medians are printed. A variant whose estimated
peak exceeds the free memory is skipped, and is null in the JSON.

With --tp T instead: T processes with --threads / T threads each. `whole`: each computes the whole vocabulary by itself,
all at once; `cut`: each has a T-th of it, and they exchange their sums (gloo). The limit is that of a process's own
products, at the rate that it measures while the others do.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import torch.nn.functional as F
from torch import Tensor

from mdlm_scale import kernels
from mdlm_scale.config import Precision
from mdlm_scale.diffusion.noise import random_bits
from mdlm_scale.model.head import masked_cross_entropy
from mdlm_scale.model.sizes import gemm_rate
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run.build import DTYPES

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
TIMEOUT_SECONDS = 3600.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="rows before masking (8192)")
    parser.add_argument("--d", type=int, default=768, help="width (768)")
    parser.add_argument("--vocab", type=int, default=50258, help="vocabulary, the mask last (50258)")
    parser.add_argument("--dtype", choices=("float32", "float64", "bf16"), default="float32")
    parser.add_argument("--masked-fraction", type=float, default=0.5, help="share of rows that are masked (0.5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (all)")
    parser.add_argument("--repeat", type=int, default=5, help="timed repetitions of each variant (5)")
    parser.add_argument("--tp", type=int, metavar="T", default=1, help="ranks that share the vocabulary")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one only, in this process; print JSON")
    args = parser.parse_args()
    if not 0 < args.masked_fraction <= 1:
        parser.error(f"--masked-fraction {args.masked_fraction} must lie in (0, 1]")
    for name, least in {"tokens": 1, "d": 1, "vocab": 2, "threads": 1, "repeat": 1, "tp": 1}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} must be at least {least}")
    return args


def original(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, x_N: Tensor, rows_M: Tensor, w_M: Tensor) -> Tensor:
    is_mask_V = torch.arange(len(bias_V), device=bias_V.device) == len(bias_V) - 1
    logits_NV = F.linear(hidden_ND, weight_VD, bias_V.masked_fill(is_mask_V, -1e6))
    log_probs_NV = logits_NV - logits_NV.logsumexp(-1, keepdim=True)
    nll_N = -log_probs_NV.gather(1, x_N[:, None]).squeeze(1)
    return (nll_N * torch.zeros_like(nll_N).index_copy(0, rows_M, w_M.to(nll_N.dtype))).sum()


def gather(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, x_N: Tensor, rows_M: Tensor, w_M: Tensor) -> Tensor:
    logits_MV = F.linear(hidden_ND.index_select(0, rows_M), weight_VD, bias_V)[:, :-1]  # without the mask
    return (F.cross_entropy(logits_MV, x_N[rows_M], reduction="none") * w_M).sum()


def ours(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, x_N: Tensor, rows_M: Tensor, w_M: Tensor) -> Tensor:
    hidden_MD, mask_id = hidden_ND.index_select(0, rows_M), len(weight_VD) - 1
    return masked_cross_entropy(hidden_MD, weight_VD, bias_V, x_N[rows_M], w_M, mask_id=mask_id)[0]


def compiled(*inputs: Tensor) -> Tensor:
    return torch.compile(gather)(*inputs)


VARIANTS: dict[str, Loss] = {"original": original, "gather": gather, "compiled": compiled, "ours": ours}


def main() -> int:
    args = arguments()
    if args.variant:
        print(json.dumps(measure(args)))
        return 0
    if args.tp > 1:
        return compare_ranks(args)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{args.threads} CPU threads"
    results: dict[str, Any] = {}
    print(
        f"{args.tokens} tokens, {args.masked_fraction:.0%} masked, d {args.d}, V {args.vocab}, {args.dtype}, {device}"
    )
    print(f"{'':10}{'seconds':>10}{'of limit':>10}{'peak MB':>10}")
    for variant in VARIANTS:
        needed, free = estimated_bytes(args, variant), free_bytes()
        if needed > free:
            results[variant] = None
            print(f"{variant:10}  skipped: about {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free", flush=True)
            continue
        results[variant] = r = in_own_process(__file__, "--variant", variant)
        print(f"{variant:10}{r['seconds']:10.3f}{r['share_of_limit']:10.1%}{r['peak_mb']:10.0f}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


def make_inputs(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Hidden rows, weight and bias, which want gradients; tokens, masked rows and their weights."""

    def uniform(stream: str, bound: float, rows: int, columns: int) -> Tensor:
        bits = random_bits(0, stream, 0, torch.arange(rows), columns)
        return (bits.double() / 2**31 - 1).mul_(bound).to(dtype).to(device)

    num_masked = max(1, int(args.tokens * args.masked_fraction))
    hidden_ND = uniform("hidden", 1.7, args.tokens, args.d).requires_grad_()
    weight_VD = uniform("weight", 0.05, args.vocab, args.d).requires_grad_()
    bias_V = uniform("bias", 0.05, args.vocab, 1).squeeze(1).requires_grad_()
    x_N = (random_bits(0, "target", 0, torch.arange(args.tokens), 1).squeeze(1) % (args.vocab - 1)).to(device)
    rows_M = (torch.arange(num_masked) * args.tokens // num_masked).to(device)
    w_M = torch.linspace(1, 2, num_masked, dtype=torch.float64).to(dtype).to(device)
    return [hidden_ND, weight_VD, bias_V, x_N, rows_M, w_M]


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Seconds, share of the limit and peak memory of one variant."""
    torch.set_num_threads(args.threads)
    device, dtype = torch.device("cuda" if torch.cuda.is_available() else "cpu"), DTYPES[Precision(args.dtype)]
    inputs = make_inputs(args, device, dtype)

    def run() -> None:
        VARIANTS[args.variant](*inputs).backward()
        for p in inputs[:3]:
            p.grad = None

    run()  # thread pools, libraries, compilation
    peak = peak_bytes(run, device)
    if device.type == "cpu":
        kernels.tune_cpu()  # from here on freed memory stays with the process, as in training
        run()
    flops = 6 * len(inputs[4]) * args.d * args.vocab
    runs = [seconds_and_rate(run, device, dtype) for _ in range(args.repeat)]
    return {
        "seconds": statistics.median(seconds for seconds, _ in runs),
        "share_of_limit": statistics.median(flops / seconds / rate for seconds, rate in runs),
        "peak_mb": peak / 1e6,
    }


def compare_ranks(args: argparse.Namespace) -> int:
    """The share of the limit with the vocabulary whole and cut, the mean of the ranks."""
    from parity.ranks import run_ranks

    threads = max(1, args.threads // args.tp)
    print(
        f"{args.tokens} tokens, {args.masked_fraction:.0%} masked, d {args.d}, V {args.vocab}, {args.dtype}, "
        f"{args.tp} ranks of {threads} CPU threads"
    )
    ranks = run_ranks(measure_rank, args.tp, args, threads, tp_size=args.tp, seconds=TIMEOUT_SECONDS)
    results = {
        how: {key: statistics.mean(rank[how][key] for rank in ranks) for key in ("seconds", "share_of_limit")}
        for how in ("whole", "cut")
    }
    print(f"{'':10}{'seconds':>10}{'of limit':>10}")
    for how, r in results.items():
        print(f"{how:10}{r['seconds']:10.3f}{r['share_of_limit']:10.1%}")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


def measure_rank(groups: Groups, args: argparse.Namespace, threads: int) -> dict[str, dict[str, float]]:
    """On every rank: medians of seconds and of the share of the limit, whole and cut taking turns."""
    from mdlm_scale.parallel import tensor

    torch.set_num_threads(threads)
    kernels.tune_cpu()
    device, dtype = torch.device("cpu"), DTYPES[Precision(args.dtype)]
    hidden_ND, weight_VD, bias_V, x_N, rows_M, w_M = make_inputs(args, device, dtype)
    assert groups.tp is not None
    places = [tensor.place(f"head.{n}", p.shape, groups.ranks.rank, args.tp) for n, p in
              {"weight": weight_VD, "bias": bias_V}.items()]  # fmt: skip
    own = [place.part_of(p.detach()).requires_grad_() for place, p in zip(places, (weight_VD, bias_V), strict=True)]
    cut = {"shard": tensor.vocab_shard(places[0], groups.tp, sequence_parallel=False)}

    def run(parameters: list[Tensor], options: dict[str, Any]) -> None:
        hidden_MD = hidden_ND.index_select(0, rows_M)
        masked_cross_entropy(
            hidden_MD, *parameters, x_N[rows_M], w_M, mask_id=args.vocab - 1, **options
        )[0].backward()  # fmt: skip
        for p in (hidden_ND, *parameters):
            p.grad = None

    works = {"whole": ([weight_VD, bias_V], {}, 1), "cut": (own, cut, args.tp)}
    found: dict[str, list[tuple[float, float]]] = {how: [] for how in works}
    for number in range(args.repeat + 1):
        for how, (parameters, options, parts) in works.items():
            groups.any(False)  # all begin together
            seconds, rate = seconds_and_rate(lambda p=parameters, o=options: run(p, o), device, dtype)
            if number:  # the first is to warm up
                found[how].append((seconds, 6 * len(rows_M) * args.d * args.vocab / parts / seconds / rate))
    return {
        how: {key: statistics.median(pair[i] for pair in pairs) for i, key in enumerate(("seconds", "share_of_limit"))}
        for how, pairs in found.items()
    }


def seconds_and_rate(work: Callable[[], None], device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """How long `work` takes, and the GEMM rate just before and after it."""
    before = gemm_rate(device, dtype, seconds=1.0)
    seconds = seconds_of(work, device)
    return seconds, (before + gemm_rate(device, dtype, seconds=1.0)) / 2


def seconds_of(work: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_own_process(script: str, *arguments: str) -> dict[str, Any]:
    """What `script` prints as JSON, called as this process was and with more arguments."""
    command = [sys.executable, script, *sys.argv[1:], *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS).stdout
    return json.loads(output.splitlines()[-1])


def peak_bytes(run: Callable[[], None], device: torch.device) -> float:
    """What `run` needs beyond what is there before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - held
    ctypes.CDLL(None).malloc_trim(0)  # what earlier runs left in the heap must not serve this one unseen
    held = _process_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    run()
    return _process_bytes("VmHWM") - held


def _process_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def estimated_bytes(args: argparse.Namespace, variant: str) -> float:
    """What a variant and its inputs will take: copies of its N x V or M x V logits, hidden rows, weights."""
    itemsize = DTYPES[Precision(args.dtype)].itemsize
    num_masked = args.tokens * args.masked_fraction
    logits = {"original": 6 * args.tokens, "gather": 4 * num_masked, "compiled": 4 * num_masked, "ours": 1000}[variant]
    return itemsize * (logits * args.vocab + 4 * (args.tokens + args.vocab) * args.d)


def free_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


if __name__ == "__main__":
    sys.exit(main())
