"""Write golden.json: 20 steps of the debug recipe in float64 on fixed text, by one process.

    PYTHONPATH=tests python tests/parity/make_golden.py

A later version must give the same numbers; where it means not to, it says so by running this again.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from conftest import DEBUG, TEXT

from mdlm_scale import config as config_module
from mdlm_scale.data import source, tokenizer
from mdlm_scale.data.loader import Loader
from mdlm_scale.model import init
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run.build import build_engine, build_model, layout_of, with_engine
from mdlm_scale.run.ema import Ema
from mdlm_scale.run.optimizer import lr_at
from mdlm_scale.run.step import forward_backward

GOLDEN = Path(__file__).with_name("golden.json")
STEPS = 20


def run(folder: Path) -> list[dict[str, Any]]:
    """Loss, gradient norm and a hash of the corrupted tokens of each step, and the sum of averaged weights' squares."""
    text = folder / "text.txt"
    text.write_text("".join(TEXT.format(number) + "\n" for number in range(200)))
    config = config_module.load(DEBUG, [f"data.train={text}", f"data.validation={text}", "train.precision=float64"])
    config = with_engine(config, world_size=1)
    groups, words = Groups(), tokenizer.load(config.tokenizer)
    layout = layout_of(config, groups.ranks)
    model = build_model(config, words.vocab_size, words.mask_id)
    rules = init.fills(model)
    engine = build_engine(
        config,
        model,
        lambda name, start, numel: init.init_range(config.run.seed, name, rules[name], start, numel),
        torch.device("cpu"),
        layout,
        groups,
    )
    ema = Ema(engine, config.ema.decay)
    rows = source.load(config.data.train, "train", config.data, words, source.open_cache(config.data))
    loader = Loader(
        rows, layout, config.batch, config.diffusion, config.run.seed, mask_id=words.mask_id,
        vocab_size=words.vocab_size, dropout_sites=model.num_dropout_sites,
    )  # fmt: skip
    found = []
    for step in range(STEPS):
        batches = loader.make(step)
        report = forward_backward(engine, batches, groups)
        update = engine.step(lambda norm: True, lr_at(config.optimizer, step))
        ema.update(engine, step + 1)
        z = b"".join(batch.z_BL.numpy().tobytes() for batch in batches)
        squares = sum(float(flat.square().sum()) for flat in ema.flats.values())
        found.append(
            {"loss": report.loss, "norm": update.grad_norm, "ema": squares, "z": hashlib.sha256(z).hexdigest()}
        )
    loader.close()
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(run(Path(folder)), indent=1) + "\n")
