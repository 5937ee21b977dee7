"""How fast are rows read, how long does the first batch after a resume take, and what does preparing cost?

    python tools/bench_data.py                                         100,000 rows of 1024 tokens
    python tools/bench_data.py --rows 20000 --batch 64 --json data.json
    python tools/bench_data.py --text corpus.txt --tokenizer gpt2      preparing, measured on your own text

Reading: the same rows, a global batch at a time in the same order, as int64 tensors, by a bare numpy memory map of one
flat file, by our reader, and by mosaicml-streaming's StreamingDataset (row by row, as its loader asks for them). They
take turns; ratios are formed within a turn and medians are printed. Resume: a new reader and loader, up to the first
corrupted batch of a step. Preparing: one worker that is running already, against its tokenizer alone in this process.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import prepare_documents as documents
import torch
from prepare_workers import Documents, Settings, Workers, prepare
from shard_writer import ShardWriter

from mdlm_scale import log as log_module
from mdlm_scale.config import BatchConfig, DataConfig, DiffusionConfig, TokenizerConfig
from mdlm_scale.data import source
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.cache import _streaming
from mdlm_scale.data.loader import Loader
from mdlm_scale.data.order import Ints, sample_ids
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, record_type
from mdlm_scale.data.source import Source
from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.diffusion.noise import random_bits
from mdlm_scale.layout import Layout

VOCAB = 50257  # tokens; the mask is one more
STEPS = (0, 1000, 10**6)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000, help="rows in all (100000)")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row (1024)")
    parser.add_argument("--batch", type=int, default=512, help="rows asked for at a time (512)")
    parser.add_argument("--shard-mb", type=float, default=16.0, help="size of a shard (16)")
    parser.add_argument("--repeat", type=int, default=7, help="turns (7)")
    parser.add_argument("--text", metavar="FILE", help="text to prepare (Python's documentation, over and over)")
    parser.add_argument("--text-mb", type=float, default=20.0, help="how much of it, repeated if need be (20)")
    parser.add_argument("--tokenizer", metavar="NAME", help="to prepare with (byte pairs, trained on that text)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    log_module.start(rank=1)  # only warnings
    with tempfile.TemporaryDirectory() as folder:
        rows, flat = write_rows(args, Path(folder))
        result = measure_reading(args, rows, flat) | {"first_batch_seconds": measure_resume(args, rows)}
        result |= measure_preparing(args, Path(folder))
    _print(args, result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def write_rows(args: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Random rows as shards and as one flat file."""
    tokenizer = made_up_tokenizer()
    (folder / "rows").mkdir()
    record = record_type(args.length, np.dtype("<u2"))
    writer = ShardWriter(folder / "rows", record, shard_bytes=int(args.shard_mb * 1e6))
    with (folder / "flat").open("wb") as flat:
        for start in range(0, args.rows, 4096):
            slots = torch.arange(start, min(start + 4096, args.rows))
            records = np.empty(len(slots), record)
            records[TOKENS] = (random_bits(0, "bench", 0, slots, args.length) % VOCAB).numpy()
            records[NUM_TOKENS] = args.length
            writer.add(records)
            flat.write(np.ascontiguousarray(records[TOKENS]).tobytes())
    writer.finish({"tokenizer": {key: getattr(tokenizer, key) for key in ("name", "fingerprint", "vocab_size")}})
    return folder / "rows", folder / "flat"


def made_up_tokenizer() -> Tokenizer:
    """Of nothing but numbers."""
    return Tokenizer("numbers", VOCAB + 1, VOCAB, 0, 0, 0, lambda texts: [], lambda ids: "", "numbers")


def open_rows(args: argparse.Namespace, rows: Path) -> Source:
    config = DataConfig(length=args.length)
    return source.load(str(rows), "train", config, made_up_tokenizer(), source.open_cache(config))


def measure_reading(args: argparse.Namespace, rows: Path, flat: Path) -> dict[str, Any]:
    _streaming()
    from streaming.base import StreamingDataset

    ours = open_rows(args, rows)
    bare = np.memmap(flat, np.uint16, mode="r").reshape(-1, args.length)
    theirs = StreamingDataset(local=str(rows), batch_size=args.batch, shuffle=False)
    readers: dict[str, Callable[[Ints], Any]] = {
        "memmap": lambda ids: torch.from_numpy(bare[ids].astype(np.int64)),
        "ours": ours.rows,
        "streaming": lambda ids: torch.from_numpy(np.stack([theirs[i][TOKENS] for i in ids.tolist()]).astype(np.int64)),
    }
    num_steps = {"memmap": 40, "ours": 40, "streaming": 2}
    ids = [sample_ids(0, step, range(args.batch), args.batch, ours.index) for step in range(max(num_steps.values()))]
    for read in readers.values():  # pages, hashes and set-up are paid for; and all read the same
        found = read(ids[0])
        assert torch.equal(found[0] if isinstance(found, tuple) else found, readers["memmap"](ids[0]))
    turns = []
    for _ in range(args.repeat):
        rates = {}
        for name, read in readers.items():
            start = time.perf_counter()
            for chosen in ids[: num_steps[name]]:
                read(chosen)
            rates[name] = num_steps[name] * args.batch * args.length / (time.perf_counter() - start)
        turns.append(rates)
    start = time.perf_counter()
    for step in range(50):
        sample_ids(0, 10**6 + step, range(args.batch), args.batch, ours.index)
    return {
        "tokens_per_second": {name: statistics.median(turn[name] for turn in turns) for name in readers},
        "share_of_memmap": statistics.median(turn["ours"] / turn["memmap"] for turn in turns),
        "times_streaming": statistics.median(turn["ours"] / turn["streaming"] for turn in turns),
        "order_milliseconds": (time.perf_counter() - start) / 50 * 1e3,
        "shards": len(ours.index.shard_rows[0]),
    }


def measure_resume(args: argparse.Namespace, rows: Path) -> dict[str, float]:
    """Seconds from nothing open to the first batch; every shard of the block is then verified once."""
    seconds: dict[str, list[float]] = {str(step): [] for step in STEPS}
    for _ in range(args.repeat):
        for step in STEPS:
            start = time.perf_counter()
            loader = Loader(
                open_rows(args, rows), Layout(), BatchConfig(args.batch, 32), DiffusionConfig(), seed=0,
                mask_id=VOCAB, vocab_size=VOCAB + 1, dropout_sites=24, prefetch=1,
            )  # fmt: skip
            loader.at(step)
            seconds[str(step)].append(time.perf_counter() - start)
            loader.close()
    return {step: statistics.median(found) for step, found in seconds.items()}


def measure_preparing(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    texts = [text for _, text in documents.python_documents()]
    if args.text:
        block = documents.blocks(documents.find([args.text]))
        texts = [text for some in block for text in documents.read(some, "text", strict=False).texts]
    name = args.tokenizer or train_tokenizer(texts, folder / "tokenizer")
    tokenizer = tokenizer_module.load(TokenizerConfig(name=name))
    texts = texts * (1 + int(args.text_mb * 1e6 / sum(map(len, texts))))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "little.jsonl").write_text(json.dumps({"text": texts[0]}) + "\n")
    settings = Settings(tokenizer=name, length=1024)
    alone, prepared = [], []
    with Workers(settings, 1) as workers:
        prepare(Documents(documents.find([str(folder / "little.jsonl")])), folder / "little", settings, workers)
        for turn in range(3):
            start = time.perf_counter()
            num_tokens = sum(
                len(ids) for some in range(0, len(texts), 16) for ids in tokenizer.encode_batch(texts[some : some + 16])
            )
            alone.append(num_tokens / (time.perf_counter() - start))
            start = time.perf_counter()
            files = documents.find([str(folder / "text.jsonl")])
            made = prepare(Documents(files), folder / f"prepared-{turn}", settings, workers)
            prepared.append(made["text_tokens"] / (time.perf_counter() - start))
    return {
        "tokenizer_tokens_per_second": statistics.median(alone),
        "preparing_tokens_per_second": statistics.median(prepared),
        "preparing_share": statistics.median(p / a for p, a in zip(prepared, alone, strict=True)),
    }


def train_tokenizer(texts: list[str], folder: Path) -> str:
    """Byte pairs like GPT-2's, from the text itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8192, special_tokens=["<end>"], show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)
    return str(folder)


def _print(args: argparse.Namespace, result: dict[str, Any]) -> None:
    rates = result["tokens_per_second"]
    print(f"{args.rows:,} rows of {args.length} tokens in {result['shards']} shards, {args.batch} at a time")
    print(f"bare memory map              {rates['memmap'] / 1e6:9.1f} M tokens/s")
    print(f"ours                         {rates['ours'] / 1e6:9.1f} M tokens/s   {result['share_of_memmap']:.0%} of it")
    print(
        f"StreamingDataset             {rates['streaming'] / 1e6:9.1f} M tokens/s   "
        f"ours is {result['times_streaming']:.1f} times as fast"
    )
    print(f"which rows form a step       {result['order_milliseconds']:9.2f} ms")
    for step, seconds in result["first_batch_seconds"].items():
        print(f"first batch at step {step:<9}{seconds:9.2f} s")
    print(f"tokenizer alone              {result['tokenizer_tokens_per_second'] / 1e6:9.2f} M tokens/s")
    print(
        f"preparing, one worker        {result['preparing_tokens_per_second'] / 1e6:9.2f} M tokens/s   "
        f"{result['preparing_share']:.0%} of it"
    )


if __name__ == "__main__":
    sys.exit(main())
