"""What is said of samples: how varied they are, and how probable another model finds their text.

A low generative perplexity alone says little, for text that repeats itself has one: the entropy stands beside it.
"""

import math
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.errors import ConfigError

Judge = tuple[Any, Any]  # a causal language model and its tokenizer, of Hugging Face


def report(samples: list[list[int]], tokenizer: Tokenizer | None = None, judge: Judge | None = None) -> dict[str, Any]:
    """entropy         of the frequencies of tokens in a sample, in nats; mean over samples
    distinct_n      different n-grams over all n-grams, of all samples together
    repetition_4    share of a sample's 4-grams that stood in it before; mean over samples
    generative_ppl  by the judge and its tokenizer, of our text without the tokens that frame documents, each document
                    on a line of its own; a first token is not scored, and what is too long is read in pieces
    """
    entropies = [-sum(n / len(ids) * math.log(n / len(ids)) for n in Counter(ids).values()) for ids in samples]
    grams = {n: [list(zip(*(ids[i:] for i in range(n)), strict=False)) for ids in samples] for n in (1, 2, 3, 4)}
    found: dict[str, Any] = {"entropy": sum(entropies) / len(entropies)}
    for n in (1, 2, 3):
        together = [gram for each in grams[n] for gram in each]
        found[f"distinct_{n}"] = len(set(together)) / len(together) if together else None
    repeats = [1 - len(set(each)) / len(each) for each in grams[4] if each]
    found["repetition_4"] = sum(repeats) / len(repeats) if repeats else None
    if tokenizer is None or judge is None:
        return found
    frame, (model, theirs) = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}, judge
    nats, count = 0.0, 0
    for sample in samples:
        documents = [tokenizer.decode(list(ids)) for framing, ids in groupby(sample, frame.__contains__) if not framing]
        ids_N = torch.tensor(theirs.encode("\n".join(documents), add_special_tokens=False), device=model.device).long()
        for ids in ids_N.split(getattr(model.config, "max_position_embeddings", None) or max(1, len(ids_N))):
            if len(ids) > 1:
                logits = model(input_ids=ids[None]).logits[0, :-1].double()
                nats += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
                count += len(ids) - 1
    return found | {"generative_ppl": math.exp(nats / count) if count else None, "judge_tokens": count}


def load_judge(name: str) -> Judge:
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        files = ["*.json", "*.txt", "*.model", "*.safetensors"]  # without a network, those that were fetched before
        where = name if Path(name).exists() else snapshot_download(name, allow_patterns=files)
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        model: Any = AutoModelForCausalLM.from_pretrained(where, use_safetensors=True, **local)
        theirs = AutoTokenizer.from_pretrained(where, **local)
        num_known, ids = model.get_input_embeddings().num_embeddings, theirs.encode("a text", add_special_tokens=False)
        if not ids:
            raise ValueError("its tokenizer finds no tokens in a text; are its files there?")
        if theirs.vocab_size > num_known:
            raise ValueError(f"its tokenizer has {theirs.vocab_size} entries, the model {num_known}")
        return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), theirs
    except Exception as error:  # whatever a strange folder makes their loaders raise
        raise ConfigError(
            f"--judge {name} cannot be loaded ({str(error).partition(chr(10))[0]}). It must be a name on the "
            f"Hugging Face hub, or a folder, of a causal language model in safetensors and its tokenizer."
        ) from error
