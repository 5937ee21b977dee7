"""The public datasets of the paper, as a table: where they are, which field holds the text, and how it is prepared.

Detokenisers undo what a corpus did to its text (spaces before punctuation, ` @-@ `, quotes apart), so that a model sees
ordinary writing. They follow the rules by which the published figures were made; each rule replaces every match.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from mdlm_scale.data.rows import Wrapping
from mdlm_scale.data.texts import PYTHON_VALIDATION

Rules = tuple[tuple[str, str], ...]  # regular expression, replacement

WIKITEXT: Rules = (
    ("s '", "s'"),
    (" @([-,.])@ ", r"\1"),
    *((f" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
PTB: Rules = (
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    (r"\\/", "/"),
    (" N(?= )", " 1"),  # also where one follows the other
    (r"\$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
)
LM1B: Rules = (
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (r" '(\w+)", r"'\1"),
    (r" (\w+) \. ", r" \1. "),
    (r" (\w+) \.$", r" \1."),
    (r" \? ", "? "),
    (r" \?$", "?"),
    (" ! ", "! "),
    (" !$", "!"),
    (" , ", ", "),
    (" : ", ": "),
    (" ; ", "; "),
    (" / ", "/"),
    (r'" ([^"]+) "', r'"\1"'),
    (r"' ([^']+) '", r"'\1'"),
    (r"\( ([^()]+) \)", r"(\1)"),
    (r"\[ ([^\[\]]+) \]", r"[\1]"),
    (r"\$ ", "$"),
    ("£ ", "£"),
)
LAMBADA: Rules = (("[“”]", '"'), (r"\A\s*", "\n"), (r"\s*\Z", ""))
DETOKENIZERS: dict[str, Rules] = {
    "none": (),
    "wikitext": WIKITEXT,
    "ptb": PTB,
    "lm1b": LM1B,
    "lambada": LAMBADA,
    "wikitext+lm1b": WIKITEXT + LM1B,
}


def detokenizer(name: str) -> Callable[[str], str]:
    """A function of a text."""
    rules = [(re.compile(pattern), replacement) for pattern, replacement in DETOKENIZERS[name]]

    def detokenize(text: str) -> str:
        for pattern, replacement in rules:
            text = pattern.sub(replacement, text)
        return text

    return detokenize


@dataclass(frozen=True)
class Recipe:
    hub: str  # dataset on the Hugging Face hub
    splits: dict[str, str]  # ours to theirs; a word in the names of their files
    config: str = ""  # folder of their files, where a dataset has several
    revision: str = "main"
    column: str = "text"  # field of a record, or its column
    detokenizer: str = "none"
    tokenizer: str = "gpt2"
    length: int = 1024
    wrapping: Wrapping = field(default_factory=Wrapping)
    validation_documents: int = 0  # the last documents of the only split


PARQUET = "refs/convert/parquet"  # where the hub keeps its own conversion of datasets that came as scripts
ZERO_SHOT = Wrapping(document_end=False)

RECIPES: dict[str, Recipe] = {
    "python": Recipe("", {}, tokenizer="bytes", length=128, validation_documents=PYTHON_VALIDATION),
    "openwebtext": Recipe("Skylion007/openwebtext", {"train": "train"}, validation_documents=100_000),
    "lm1b": Recipe(
        "billion-word-benchmark/lm1b", {"train": "train", "validation": "test"}, revision=PARQUET,
        detokenizer="lm1b", tokenizer="bert-base-uncased", length=128, wrapping=Wrapping(padded=True),
    ),
    "text8": Recipe("afmck/text8", {"train": "train", "validation": "valid(ation)?"}, tokenizer="text8", length=256),
    "wikitext": Recipe(
        "Salesforce/wikitext", {"train": "train", "validation": "valid(ation)?"}, "wikitext-103-raw-v1",
        detokenizer="wikitext", wrapping=ZERO_SHOT,
    ),
    "ptb": Recipe(
        "ptb-text-only/ptb_text_only", {"train": "train", "validation": "valid(ation)?"}, revision=PARQUET,
        column="sentence", detokenizer="ptb", wrapping=ZERO_SHOT,
    ),
    "lambada": Recipe(
        "EleutherAI/lambada_openai", {"validation": "test"}, "default", revision=PARQUET, detokenizer="lambada",
        wrapping=ZERO_SHOT,
    ),
    "ag_news": Recipe(
        "fancyzhx/ag_news", {"train": "train", "validation": "test"}, detokenizer="wikitext+lm1b", wrapping=ZERO_SHOT,
    ),
    "scientific_papers_arxiv": Recipe(
        "armanc/scientific_papers", {"train": "train", "validation": "valid(ation)?"}, "arxiv", PARQUET,
        column="article", detokenizer="wikitext+lm1b", wrapping=ZERO_SHOT,
    ),
    "scientific_papers_pubmed": Recipe(
        "armanc/scientific_papers", {"train": "train", "validation": "valid(ation)?"}, "pubmed", PARQUET,
        column="article", detokenizer="wikitext+lm1b", wrapping=ZERO_SHOT,
    ),
}  # fmt: skip
