"""What is said of samples: how varied they are, and how probable another model finds their text.

A low generative perplexity alone says little, for text that repeats itself has one: the entropy stands beside it.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mdlm_scale.errors import ConfigError

FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]  # of a model on the hub
Judge = tuple[Any, Any]  # a causal language model and its tokenizer, of Hugging Face
Figures = dict[str, float | str | None]


def figures(samples: list[list[int]], texts: list[str], judge: Judge | None) -> Figures:
    """Of the tokens of all samples, and of their texts if there is a judge.

    entropy         of the frequencies of tokens in a sample, in nats; mean over samples
    distinct_n      different n-grams over all n-grams, of all samples together
    repetition_4    share of a sample's 4-grams that stood in it before; mean over samples
    generative_ppl  of the texts under the judge: a first token is not scored, and what is too long for the judge is
                    read in pieces
    """
    grams = {n: [list(zip(*(ids[i:] for i in range(n)), strict=False)) for ids in samples] for n in (1, 2, 3, 4)}
    found: Figures = {"entropy": _mean([_entropy(ids) for ids in samples if ids])}
    for n in (1, 2, 3):
        together = [gram for of_sample in grams[n] for gram in of_sample]
        found[f"distinct_{n}"] = len(set(together)) / len(together) if together else None
    found["repetition_4"] = _mean([1 - len(set(of_sample)) / len(of_sample) for of_sample in grams[4] if of_sample])
    if judge is not None:
        scores = [score for text in texts for score in _scores(text, *judge)]
        tokens = sum(count for _, count in scores)
        found["generative_ppl"] = math.exp(sum(nats for nats, _ in scores) / tokens) if tokens else None
        found |= {"judge": judge[0].name_or_path, "judge_tokens": tokens}
    return found


def load_judge(name: str) -> Judge:
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def both(where: str) -> Judge:
        model = AutoModelForCausalLM.from_pretrained(where, local_files_only=True, use_safetensors=True)
        return model.eval(), AutoTokenizer.from_pretrained(where, local_files_only=True)

    try:
        try:
            return both(name)  # the network is asked last
        except (OSError, ValueError):
            if Path(name).exists():
                raise
            return both(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # whatever a strange folder makes their loaders raise
        raise ConfigError(
            f"--judge {name} cannot be loaded ({str(error).partition(chr(10))[0]}). It must be a name on the "
            f"Hugging Face hub, or a folder, of a causal language model in safetensors and its tokenizer."
        ) from error


def _scores(text: str, model: Any, tokenizer: Any) -> list[tuple[float, int]]:
    """Nats of each piece, and of how many tokens."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.long, device=model.device)
    found = []
    for piece in ids.split(getattr(model.config, "max_position_embeddings", None) or max(1, len(ids))):
        if len(piece) > 1:
            with torch.inference_mode():
                logits = model(input_ids=piece[None]).logits[0, :-1].double()
            found.append((float(F.cross_entropy(logits, piece[1:], reduction="sum")), len(piece) - 1))
    return found


def _entropy(ids: list[int]) -> float:
    return -sum(n / len(ids) * math.log(n / len(ids)) for n in Counter(ids).values())


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
