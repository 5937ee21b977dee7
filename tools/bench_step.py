"""How fast is a training step, where does its time go, and what share of this machine's matrix-product rate is that?

    python tools/bench_step.py                                  the paper's small model, 4096 tokens a step
    python tools/bench_step.py --size tiny --tokens 8192 --length 256 --repeat 5 --json step.json

Every repetition measures in turn the GEMM rate, the forward and backward pass, the head and loss alone, the dropout
alone, and optimizer + EMA; ratios are formed within a repetition and the medians are printed. `blocks` is the forward
and backward pass less dropout, head and loss (it holds the embedding too). Then as many steps run as in training, from
shards on disk through the loader's thread: what part of their time does the step wait for data?

The original's step runs in a process of its own, in plain PyTorch: the same network from separate operations, every row
through the head, log-softmax over the vocabulary, AdamW, EMA, and a C library as it comes (ours keeps freed memory).
Both times are multiplied by the GEMM rate measured beside them before they are compared.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F
from bench_masked_ce import in_own_process, original, seconds_and_rate, seconds_of
from shard_writer import ShardWriter
from torch import Tensor

from mdlm_scale import kernels
from mdlm_scale.config import (
    BatchConfig,
    Config,
    DiffusionConfig,
    EngineName,
    ModelConfig,
    ParallelConfig,
    Precision,
    TrainConfig,
)
from mdlm_scale.data import shards, source
from mdlm_scale.data.loader import Loader
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, record_type, token_type
from mdlm_scale.diffusion import corrupt, noise, schedule
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.layout import Layout
from mdlm_scale.model.dit import DiT, rotary_angles, sinusoid
from mdlm_scale.model.init import Fill, init_range
from mdlm_scale.model.sizes import sizes
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run.build import DTYPES, build_engine
from mdlm_scale.run.ema import Ema

SIZES = {"debug": (64, 2, 4), "tiny": (512, 8, 8), "small": (768, 12, 12), "medium": (1024, 24, 16)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small", help="width, layers and heads of the paper (small)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a step (4096)")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row (1024)")
    parser.add_argument("--vocab", type=int, default=50258, help="vocabulary, the mask last (50258)")
    parser.add_argument("--dtype", choices=("float32", "float64", "bf16"), default="float32")
    parser.add_argument("--dropout", type=float, default=0.1, help="as in the recipes (0.1)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions (3)")
    parser.add_argument("--threads", type=int, help="CPU threads (all)")
    parser.add_argument("--original", action="store_true", help="time the original's step only; print JSON")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    if args.tokens % args.length:
        parser.error(f"--tokens {args.tokens} is not a multiple of --length {args.length}")
    return args


def main() -> int:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.original:
        print(json.dumps(measure_original(args)))
        return 0
    result = measure(args)
    result |= in_own_process(__file__, "--original")
    result["faster_than_original"] = result["original_gflop_per_token"] / result["gflop_per_token"]
    _print(args, result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


@dataclass
class Setting:
    """What both steps compute on: a model, still on the meta device, and a corrupted batch."""

    device: torch.device
    dtype: torch.dtype
    model: DiT
    batch: Batch

    def peak_mb(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e6
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def make_setting(args: argparse.Namespace) -> Setting:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[Precision(args.dtype)]
    width, layers, heads = SIZES[args.size]
    config = ModelConfig(hidden_size=width, num_layers=layers, num_heads=heads, dropout=args.dropout)
    with torch.device("meta"):
        model = DiT(config, args.vocab, mask_id=args.vocab - 1)
    diffusion, num_rows = DiffusionConfig(), args.tokens // args.length
    x_BL = noise.random_bits(0, "bench", 0, torch.arange(num_rows), args.length) % (args.vocab - 1)
    batch = corrupt.corrupted(
        x_BL, torch.ones_like(x_BL, dtype=torch.bool), noise.times(diffusion, 0, 0, num_rows),
        config=diffusion, schedule=schedule.from_config(diffusion), seed=0, step=0, slots=range(num_rows),
        mask_id=args.vocab - 1, vocab_size=args.vocab, dropout_sites=model.num_dropout_sites,
    ).to(device)  # fmt: skip
    return Setting(device, dtype, model, batch)


def initial(name: str, start: int, numel: int) -> Tensor:
    """Weights without zeros: those of a fresh model would spare work."""
    return init_range(0, name, Fill(bound=0.02), start, numel)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Our step and its parts."""
    if not torch.cuda.is_available():
        kernels.tune_cpu()
    setting = make_setting(args)
    model, device, dtype, batch = setting.model, setting.device, setting.dtype, setting.batch
    plain, precision = ParallelConfig(EngineName.plain), TrainConfig(precision=Precision(args.dtype))
    config = Config(model=model.config, parallel=plain, train=precision)
    engine = build_engine(config, model, initial, device, Layout(), Groups())
    ema = Ema(engine, 0.9999)
    with torch.no_grad():
        hidden_BLD = model.hidden(batch.z_BL, batch.sigma_B, None)
    hidden_MD = hidden_BLD.flatten(0, 1)[batch.rows_M].detach().requires_grad_()
    y_BLD = torch.ones_like(hidden_BLD, requires_grad=True)

    def forward_backward() -> None:
        engine.forward_backward([batch], args.tokens)

    def head_and_loss() -> None:
        model.head(hidden_MD, batch.target_M, batch.weight_M)[0].backward()
        hidden_MD.grad = None

    def dropout() -> None:
        for keys in () if batch.dropout_keys is None else batch.dropout_keys:
            model.blocks[0].drop(y_BLD, keys[None], 0).backward(hidden_BLD)
            y_BLD.grad = None

    def update() -> None:
        engine.step(lambda norm: True, 0.0)
        ema.update(engine, 1)

    forward_backward()
    update()  # the first of each pays for memory and set-up
    flops = sizes(model.config, args.vocab, args.length).step_flops(args.tokens, len(batch.rows_M))
    runs = []
    for _ in range(args.repeat):
        full, rate = seconds_and_rate(forward_backward, device, dtype)
        optimizer, dropped, head = (seconds_of(work, device) for work in (update, dropout, head_and_loss))
        model.head.zero_grad()
        runs.append(
            {
                "gemm_gflops": rate / 1e9,
                "forward_backward_seconds": full,
                "blocks_seconds": full - head - dropped,
                "head_and_loss_seconds": head,
                "dropout_seconds": dropped,
                "optimizer_and_ema_seconds": optimizer,
                "share_of_limit": flops / full / rate,
                "tokens_per_second": args.tokens / (full + optimizer),
                "gflop_per_token": rate / 1e9 * (full + optimizer) / args.tokens,
            }
        )
    result: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}

    def step(batches: list[Batch]) -> None:
        engine.forward_backward([each.to(device) for each in batches], args.tokens)
        update()

    return result | {
        "data_wait_share": data_wait_share(args, model.num_dropout_sites, step),
        "parameters": sum(p.numel() for p in model.parameters()),
        "masked_rows": len(batch.rows_M),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "peak_mb": setting.peak_mb(),
    }


def data_wait_share(args: argparse.Namespace, dropout_sites: int, step: Callable[[list[Batch]], None]) -> float:
    """Of the time of some steps, how much passes until their batches are there; the first one fills the pipe."""
    num_slots = args.tokens // args.length
    records = np.empty(64 * num_slots, record_type(args.length, token_type(args.vocab)))
    bits = noise.random_bits(0, "bench", 1, torch.arange(len(records)), args.length)
    records[TOKENS], records[NUM_TOKENS] = bits % (args.vocab - 1), args.length
    with tempfile.TemporaryDirectory() as folder:
        writer = ShardWriter(Path(folder), records.dtype, shard_bytes=1 << 20)
        writer.add(records)
        writer.finish({"tokenizer": {"fingerprint": ""}})
        rows = source.Source([source.mapped(shards.read_folder(Path(folder)))])
        loader = Loader(
            rows, Layout(), BatchConfig(num_slots, num_slots), DiffusionConfig(), seed=0,
            mask_id=args.vocab - 1, vocab_size=args.vocab, dropout_sites=dropout_sites,
        )  # fmt: skip
        step(loader.at(0))
        loader.waited_seconds, start = 0.0, time.monotonic()
        for number in range(1, args.repeat + 1):
            step(loader.at(number))
        share = loader.waited_seconds / (time.monotonic() - start)
        loader.close()
    return share


def measure_original(args: argparse.Namespace) -> dict[str, float]:
    """The step of the paper's released code, as plain PyTorch."""
    setting = make_setting(args)
    device, dtype, batch, model = setting.device, setting.dtype, setting.batch, filled(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    averages = [p.detach().clone() for p in model.parameters()]

    def step() -> None:
        hidden_ND = originals_hidden(model, batch).flatten(0, 1).to(dtype)
        head = model.head
        loss = original(hidden_ND, head.weight, head.bias, batch.x_BL.flatten(), batch.rows_M, batch.weight_M)
        optimizer.zero_grad()
        (loss / args.tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for average, p in zip(averages, model.parameters(), strict=True):
                average.sub_((average - p) * 1e-4)

    step()
    runs = [seconds_and_rate(step, device, dtype) for _ in range(args.repeat)]
    return {
        "original_tokens_per_second": statistics.median(args.tokens / seconds for seconds, _ in runs),
        "original_gflop_per_token": statistics.median(rate / 1e9 * seconds / args.tokens for seconds, rate in runs),
        "original_peak_mb": setting.peak_mb(),
    }


def filled(setting: Setting) -> DiT:
    """The model on its device, with its weights."""
    model = setting.model.to(setting.dtype).to_empty(device=setting.device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial(name, 0, p.numel()).view(p.shape))
    return model


def originals_hidden(model: DiT, batch: Batch) -> Tensor:
    """What the head reads, from one operation after the other, with a generator's dropout."""
    length, num_heads, dropout = batch.x_BL.shape[1], model.config.num_heads, model.config.dropout
    width = model.config.hidden_size
    c_BC = sinusoid(torch.zeros_like(batch.sigma_B))
    c_BC = F.silu(model.time_out(F.silu(model.time_in(c_BC))))
    cos, sin = (
        torch.cat([r, r], dim=-1).float()[:, None] for r in rotary_angles(length, width // num_heads, c_BC.device)
    )

    def rotated(x_BLHK: Tensor) -> Tensor:
        first, second = x_BLHK.chunk(2, dim=-1)
        return x_BLHK * cos + torch.cat([-second, first], dim=-1) * sin

    def modulated(x_BLD: Tensor, weight_D: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(x_BLD.float(), [width]) * weight_D * (1 + scale) + shift

    x_BLD = model.embed(batch.z_BL)
    for block in model.blocks:
        shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(c_BC)[:, None].chunk(6, dim=-1)
        y_BLD = modulated(x_BLD, block.norm1.weight, shift1, scale1)
        q, k, v = block.qkv(y_BLD).unflatten(-1, (num_heads, 3, -1)).unbind(-2)
        q, k, v = (x.to(v.dtype).transpose(1, 2) for x in (rotated(q), rotated(k), v))
        y_BLD = block.attn_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x_BLD = x_BLD + gate1 * F.dropout(y_BLD, dropout)
        y_BLD = modulated(x_BLD, block.norm2.weight, shift2, scale2)
        y_BLD = block.mlp_out(F.gelu(block.mlp_in(y_BLD), approximate="tanh"))
        x_BLD = x_BLD + gate2 * F.dropout(y_BLD, dropout)
    shift, scale = model.modulation(c_BC)[:, None].chunk(2, dim=-1)
    return modulated(x_BLD, model.norm.weight, shift, scale)


def _print(args: argparse.Namespace, result: dict[str, Any]) -> None:
    full = result["forward_backward_seconds"]
    print(
        f"{args.size}: {result['parameters']:,} parameters, {args.tokens} tokens a step in rows of {args.length}, "
        f"{result['masked_rows']} masked, {args.dtype} on {result['device']}, {result['threads']} threads, "
        f"dropout {args.dropout}"
    )
    print(f"GEMM rate of this machine    {result['gemm_gflops']:9.1f} GFLOP/s")
    print(f"forward + backward           {full:9.3f} s   {result['share_of_limit']:.1%} of the GEMM limit")
    for part in ("blocks", "head_and_loss", "dropout"):
        seconds = result[part + "_seconds"]
        print(f"  {part.replace('_', ' '):<27}{seconds:9.3f} s   {seconds / full:.1%}")
    print(f"optimizer + EMA              {result['optimizer_and_ema_seconds']:9.3f} s")
    print(f"waiting for data             {result['data_wait_share']:9.2%} of a step")
    print(
        f"whole step                   {result['tokens_per_second']:9.0f} tokens/s, {result['peak_mb']:.0f} MB at most"
    )
    print(
        f"the original's               {result['original_tokens_per_second']:9.0f} tokens/s, "
        f"{result['original_peak_mb']:.0f} MB at most"
    )
    print(f"ours, at equal GEMM rates    {result['faster_than_original']:9.2f} times as fast")


if __name__ == "__main__":
    sys.exit(main())
