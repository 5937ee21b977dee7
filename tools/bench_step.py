"""How fast is a training step, where does its time go, and what share of this machine's matrix-product rate is that?

    python tools/bench_step.py                                  the paper's small model, 4096 tokens a step
    python tools/bench_step.py --size tiny --tokens 8192 --length 256 --repeat 5 --json step.json

Every repetition measures in turn the GEMM rate, the forward and backward pass, the head and loss alone, the dropout
alone, and optimizer + EMA; ratios are formed within a repetition and the medians are printed. `blocks` is the forward
and backward pass less dropout, head and loss (it holds the embedding too).
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    if args.tokens % args.length:
        parser.error(f"--tokens {args.tokens} is not a multiple of --length {args.length}")
    return args


def main() -> int:
    args = arguments()
    import torch

    from mdlm_scale import kernels
    from mdlm_scale.config import DiffusionConfig, ModelConfig, OptimizerConfig, Precision
    from mdlm_scale.diffusion import corrupt, noise, schedule
    from mdlm_scale.model.dit import DiT
    from mdlm_scale.model.init import Fill, init_range
    from mdlm_scale.model.sizes import gemm_rate, sizes
    from mdlm_scale.parallel.plain import PlainEngine
    from mdlm_scale.run.ema import Ema
    from mdlm_scale.run.main import DTYPES

    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[Precision(args.dtype)]
    if device.type == "cpu":
        kernels.tune_cpu()

    width, layers, heads = SIZES[args.size]
    config = ModelConfig(hidden_size=width, num_layers=layers, num_heads=heads, dropout=args.dropout)
    with torch.device("meta"):
        model = DiT(config, args.vocab, mask_id=args.vocab - 1)
    engine = PlainEngine(
        model,
        init_range=lambda name, start, numel: init_range(0, name, Fill(bound=0.02), start, numel),  # no zeros
        make_optimizer=partial(kernels.adamw, config=OptimizerConfig(), device=device),
        max_norm=1.0,
        device=device,
        dtype=dtype,
    )
    ema = Ema(engine, 0.9999)

    diffusion = DiffusionConfig()
    num_rows = args.tokens // args.length
    slot_B = torch.arange(num_rows)
    x_BL = noise.random_bits(0, "bench", 0, slot_B, args.length) % (args.vocab - 1)
    batch = corrupt.corrupted(
        x_BL, torch.ones_like(x_BL, dtype=torch.bool), noise.times(diffusion, 0, 0, num_rows),
        config=diffusion, schedule=schedule.from_config(diffusion), seed=0, step=0, slots=range(num_rows),
        mask_id=args.vocab - 1, vocab_size=args.vocab, dropout_sites=model.num_dropout_sites,
    ).to(device)  # fmt: skip
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

    def seconds(work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    forward_backward()
    update()  # the first of each pays for memory and set-up
    flops = sizes(config, args.vocab, args.length).step_flops(args.tokens, len(batch.rows_M))
    runs = []
    for _ in range(args.repeat):
        before = gemm_rate(device, dtype)
        full = seconds(forward_backward)
        after = gemm_rate(device, dtype)
        optimizer = seconds(update)
        dropped = seconds(dropout)
        head = seconds(head_and_loss)
        model.head.zero_grad()
        rate = (before + after) / 2
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
            }
        )
    result: dict[str, float | str] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    peak = torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else _peak_mb()
    result |= {"peak_mb": peak, "masked_rows": len(batch.rows_M), "threads": torch.get_num_threads()}
    _print(args, result, device.type, sum(p.numel() for p in model.parameters()))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _print(args: argparse.Namespace, result: dict, device: str, num_parameters: int) -> None:
    full = result["forward_backward_seconds"]
    print(
        f"{args.size}: {num_parameters:,} parameters, {args.tokens} tokens a step in rows of {args.length}, "
        f"{result['masked_rows']} masked, {args.dtype} on {device}, {result['threads']} threads, dropout {args.dropout}"
    )
    print(f"GEMM rate of this machine    {result['gemm_gflops']:9.1f} GFLOP/s")
    print(f"forward + backward           {full:9.3f} s   {result['share_of_limit']:.1%} of the GEMM limit")
    for part in ("blocks", "head_and_loss", "dropout"):
        print(
            f"  {part.replace('_', ' '):<27}{result[part + '_seconds']:9.3f} s   {result[part + '_seconds'] / full:.1%}"
        )
    print(f"optimizer + EMA              {result['optimizer_and_ema_seconds']:9.3f} s")
    print(f"whole step                   {result['tokens_per_second']:9.0f} tokens/s")
    print(f"peak memory of the process   {result['peak_mb']:9.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
