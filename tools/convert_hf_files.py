"""What a Hugging Face export holds beside its weights: configuration, tokenizer, an example, a model card."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from convert_sources import Source

import mdlm_scale
from mdlm_scale import config as config_module
from mdlm_scale.config import BlockName
from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.diffusion import schedule
from mdlm_scale.errors import ConfigError
from mdlm_scale.model.dit import num_kv_heads

MODEL_FILE = "modeling_mdlm_scale.py"
# transformers fetches the original's code from there
HUB = "kuleshov-group/mdlm-owt--"


def config_of(source: Source, tokenizer: Tokenizer | None, mask_id: int, told: dict[str, Any]) -> dict[str, Any]:
    """Fields that the original's configuration has too, and under `mdlm_scale` what a way back needs."""
    model = source.config.model
    run = config_module.to_tree(source.config)
    shape = schedule.from_config(source.config.diffusion)
    found: dict[str, Any] = {
        "vocab_size": source.vocab_size,
        "model_length": source.config.data.length,
        "hidden_dim": model.hidden_size,
        "cond_dim": model.cond_size,
        "n_blocks": model.num_layers,
        "n_heads": model.num_heads,
        "dropout": model.dropout,
        "time_conditioning": model.time_conditioning,
        **({"block": "modern", "n_kv_heads": num_kv_heads(model)} if model.block is BlockName.modern else {}),
        "tie_word_embeddings": False,
        "mask_token_id": mask_id,
        "schedule": vars(shape) | {"name": str(shape.name)},
        "mdlm_scale": {"version": mdlm_scale.__version__, **told, "config": run},
    }
    if tokenizer is not None:
        names = ("bos", "eos", "pad")
        found |= {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in names}
        found["mdlm_scale"]["tokenizer_fingerprint"] = tokenizer.fingerprint
        run["tokenizer"]["name"] = tokenizer.name
    return found


def write_config(folder: Path, to: str, dtype: str, config: dict[str, Any]) -> None:
    if to == "hf":
        module = MODEL_FILE.removesuffix(".py")
        classes = {"AutoConfig": f"{module}.MdlmConfig", "AutoModelForMaskedLM": f"{module}.MdlmForMaskedLM"}
        kind = {"architectures": ["MdlmForMaskedLM"], "model_type": "mdlm_scale", "auto_map": classes, "dtype": dtype}
    else:
        classes = {
            "AutoConfig": f"{HUB}configuration_mdlm.MDLMConfig",
            "AutoModelForMaskedLM": f"{HUB}modeling_mdlm.MDLM",
        }
        kind = {"architectures": ["MDLM"], "model_type": "mdlm", "auto_map": classes, "torch_dtype": dtype}
    _write(folder / "config.json", json.dumps(kind | config, indent=2) + "\n")


def write_beside(
    folder: Path, source: Source, tokenizer: Tokenizer | None, weights: str, config: dict[str, Any]
) -> None:
    """All that is not weights or config.json."""
    shutil.copyfile(Path(__file__).with_name("convert_hf_model.py"), folder / MODEL_FILE)
    _write(folder / "generate.py", EXAMPLE)
    _write(folder / "README.md", _card(source, tokenizer, weights, config))
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer, source.config.data.length)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, length: int) -> None:
    """As AutoTokenizer loads it, with the ids of ours; for `bytes` and `text8` one made of parts of `tokenizers`."""
    if tokenizer.name not in ("bytes", "text8"):
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(tokenizer.name, local_files_only=True, trust_remote_code=False)
        if theirs.mask_token_id is None:
            theirs.add_special_tokens({"mask_token": "[MASK]"})
        if theirs.mask_token_id != tokenizer.mask_id:
            raise ConfigError(
                f"The ids of the tokenizer '{tokenizer.name}' have gaps: it has no mask token, and would give a new "
                f"one id {theirs.mask_token_id}; the model has {tokenizer.mask_id}. Add the token to it, with that id."
            )
        theirs.save_pretrained(folder)
        return
    made, specials = _bytes() if tokenizer.name == "bytes" else _text8(tokenizer)
    made.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast", **specials, "clean_up_tokenization_spaces": False,
        "model_max_length": length, "model_input_names": ["input_ids"],
    }  # fmt: skip
    _write(folder / "tokenizer_config.json", json.dumps(told, indent=2) + "\n")


def _bytes() -> tuple[Any, dict[str, str]]:
    """Byte-level BPE without merges: a byte is a token."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Made

    # byte-level BPE shows a byte as a character: printable ones as themselves, the others from 256 on
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    vocabulary = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    made = Made(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    names = ("bos", "eos", "pad", "mask")
    made.add_special_tokens([AddedToken(f"[{name.upper()}]", normalized=False) for name in names])
    return made, {f"{name}_token": f"[{name.upper()}]" for name in names}


def _text8(tokenizer: Tokenizer) -> tuple[Any, dict[str, str]]:
    """A character is a token."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Made

    symbols = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    made = Made(models.WordLevel(vocab={symbol: i for i, symbol in enumerate(symbols)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(symbol, normalized=False) for symbol in symbols if len(symbol) > 1])
    names = ("cls", "sep", "bos", "eos", "mask", "pad", "unk")
    return made, {f"{name}_token": f"[{name.upper()}]" for name in names}


def _card(source: Source, tokenizer: Tokenizer | None, weights: str, config: dict[str, Any]) -> str:
    model, length = source.config.model, source.config.data.length
    step = "" if source.step is None else f", step {source.step:,}"
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: fill-mask\ntags: [masked-diffusion, mdlm]\n---\n",
        "# A masked diffusion language model\n",
        f"MDLM ([arXiv 2406.07524](https://arxiv.org/abs/2406.07524)): {model.num_layers} blocks, width "
        f"{model.hidden_size}, {model.num_heads} heads, vocabulary {source.vocab_size}, rows of {length} tokens, "
        f"{'with' if model.time_conditioning else 'without'} time conditioning. "
        f"{weights[0].upper()}{weights[1:]}{step}. Exported by mdlm_scale {mdlm_scale.__version__}.\n",
        _use(tokenizer, config["mask_token_id"]),
    ]
    if found := evaluation(source):
        parts.append("## Evaluation\n\nOn the validation rows of the run, averaged weights; nats a token.\n")
        rows = "".join(f"| {key} | {value} |\n" for key, value in found.items() if key != "kind" and value is not None)
        parts.append(f"| | |\n|---|---|\n{rows}")
    if source.format in ("native", "hf"):
        parts.append(f"## Recipe\n\n```yaml\n{config_module.to_yaml(source.config)}```\n")
        parts += [f"## Data\n\n`{where}`\n\n```json\n{text}\n```\n" for where, text in _manifests(source)]
    return "\n".join(parts)


def _use(tokenizer: Tokenizer | None, mask_id: int) -> str:
    mask = f"The mask is token {mask_id}; logits are raw, its column was never trained and is no answer."
    if tokenizer is None:
        return f"There is no tokenizer in this folder. {mask}\n"
    return f"""## Use

```
python generate.py --prompt "Once" --num 2
```

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

model = AutoModelForMaskedLM.from_pretrained(".", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)
ids = model.generate(num_samples=2, num_steps=128, seed=0)  # or sampler="first_hitting"
print(tokenizer.batch_decode(ids))
logits = model(input_ids=ids).logits  # `labels=`: the loss where they are not -100
```

{mask} In a text that is encoded, `{"[MASK]"}` and other special tokens are read as such.
"""


def evaluation(source: Source) -> dict[str, Any] | None:
    """The last figures of the run's metrics.jsonl that are of this checkpoint or before."""
    metrics = source.path.parent.parent / "metrics.jsonl"
    if source.format != "native" or source.path.parent.name != "checkpoints" or not metrics.is_file():
        return None
    found = None
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # a line being written
            continue
        if row.get("kind") == "eval" and row["step"] <= (source.step or 0):
            found = row
    return found


def _manifests(source: Source) -> list[tuple[str, str]]:
    """What is known of the training data, each shard's hash apart."""
    train = source.config.data.train
    found = []
    for where in [train] if isinstance(train, str) else train:
        file = Path(where) / "manifest.json"
        try:
            manifest = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        manifest["shards"] = f"{len(manifest.get('shards', []))} shards"
        manifest["sha256 of the manifest"] = hashlib.sha256(file.read_bytes()).hexdigest()
        found.append((where, json.dumps(manifest, indent=1)))
    return found


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


EXAMPLE = '''"""Text from the model in this folder: python generate.py [--prompt TEXT] [--num 2] [--seed 0]"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--prompt", default="", help="the text goes on from here")
parser.add_argument("--num", type=int, default=2, help="how many samples (2)")
parser.add_argument("--steps", type=int, default=128, help="of the ancestral sampler (128)")
parser.add_argument("--sampler", default="ancestral", choices=["ancestral", "first_hitting"])
parser.add_argument("--length", type=int, help="tokens of a sample (as in training)")
parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
args = parser.parse_args()

folder = Path(__file__).resolve().parent
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
model.to("cuda" if torch.cuda.is_available() else "cpu")
prompt, tokenizer = [], None
if (folder / "tokenizer_config.json").is_file():
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    prompt = [model.config.bos_token_id, *tokenizer(args.prompt, add_special_tokens=False).input_ids]
elif args.prompt:
    parser.error("--prompt needs a tokenizer, and there is none in this folder")
try:
    ids = model.generate(
        torch.tensor([prompt], dtype=torch.long), num_samples=args.num, num_steps=args.steps, sampler=args.sampler,
        length=args.length, seed=args.seed,
    )
except ValueError as error:
    parser.error(str(error))
for number, sample in enumerate(ids.tolist()):
    print(f"--- sample {number}")
    print(tokenizer.decode(sample) if tokenizer else sample)
'''
