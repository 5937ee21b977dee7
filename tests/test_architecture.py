"""The house in order: who imports whom, which doors lead outside, no hidden randomness, and the size of things.

A rule is a function of (path within the package, source) that yields what breaks it; each must also catch a made-up
offender, so that a rule which has stopped looking is noticed.
"""

import ast
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mdlm_scale"
FILES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

LAYERS = {
    "__init__": 0, "errors": 0, "log": 0, "config": 0, "layout": 0, "kernels": 0, "row_kernel": 0,
    "diffusion": 1,
    "model": 2, "data": 2,
    "parallel": 3,
    "run": 4,
    "train": 5, "evaluate": 5, "sample": 5, "plan": 5,
}  # fmt: skip
SERVE_ALL = ("errors", "log")
SERVE_SOME = {"config": ("layout", "kernels"), "row_kernel": ("kernels",)}  # of layer 0: who may import them there

# outside module -> where it may be imported
DOORS = {
    "omegaconf": "config.py",
    "flash_attn": "kernels.py",
    "apex": "kernels.py",
    "mdlm_scale.row_kernel": "kernels.py",
    "triton": "row_kernel.py",
    "megatron": "parallel/tensor.py",
    "deepspeed": "parallel/deepspeed.py",
    "torch.distributed.fsdp": "parallel/fsdp.py",
    "streaming": "data/",
    "wandb": "run/metrics.py",
}
# file or room -> the only outside modules it may import
ONLY = {"diffusion/": {"torch"}, "model/hf_export.py": {"torch", "transformers"}}

RANDOM = re.compile(
    r"(random|secrets|(numpy|np)\.random|torch\.(\w+\.)*(Generator|manual_seed\w*|seed|rand\w*|normal|bernoulli|multinomial"
    r"|poisson)|(F|nn|torch)\.(\w+\.)*\w*[dD]ropout\w*|.*\.(uniform|normal|bernoulli|random|exponential|geometric)_)(\..*)?"
)


def layers(path: str, source: str) -> Iterator[str]:
    """Only lower layers and the own folder; within layer 0, `errors` and `log`, and what serves some."""
    own = room(path)
    if own not in LAYERS:
        yield f"{own} is no room of the house"
        return
    for name in imports(source):
        parts = name.split(".")
        if not parts[0]:
            yield f"{name} is relative: write mdlm_scale in full"
        if parts[0] != PACKAGE.name or len(parts) == 1 or parts[1] == "__version__":
            continue
        theirs = parts[1]
        if theirs not in LAYERS:
            yield f"{name} is in no room of the house"
        elif theirs == own and "/" in path:
            continue
        elif path == "model/hf_export.py":
            yield f"{name}, but an export stands alone"
        elif LAYERS[own] == 0:
            if theirs not in SERVE_ALL and own not in SERVE_SOME.get(theirs, ()):
                yield f"{own} imports {name} of its own layer"
        elif LAYERS[theirs] >= LAYERS[own]:
            yield f"layer {LAYERS[own]} imports {name} of layer {LAYERS[theirs]}"


def doors(path: str, source: str) -> Iterator[str]:
    """A package with a door is imported there alone; pure rooms import nothing else from outside."""
    for name in imports(source):
        for module, door in DOORS.items():
            if f"{name}.".startswith(f"{module}.") and not path.startswith(door):
                yield f"{name}, whose only door is {door}"
        top = name.split(".")[0]
        outside = top not in sys.stdlib_module_names and top != PACKAGE.name
        for place, allowed in ONLY.items():
            if path.startswith(place) and outside and top not in allowed:
                yield f"{name}, but {place} imports only {sorted(allowed)}"


def randomness(path: str, source: str) -> Iterator[str]:
    """Every random number is a function of (seed, step, slot): nobody draws one."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [*imports(source), *(ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute))]
    yield from (name for name in names if RANDOM.fullmatch(name))
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    yield from ("hash()" for func in calls if isinstance(func, ast.Name) and func.id == "hash")


def precision(path: str, source: str) -> Iterator[str]:
    """`.float()` lowers float64."""
    if path.startswith(("diffusion/", "model/", "parallel/")):
        calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
        yield from (f"line {f.lineno}" for f in calls if isinstance(f, ast.Attribute) and f.attr == "float")


def docstring(path: str, source: str) -> Iterator[str]:
    """A file says what it decides."""
    if not ast.get_docstring(ast.parse(source)) and not (path.endswith("__init__.py") and not source.strip()):
        yield "has none"


def file_length(path: str, source: str) -> Iterator[str]:
    if (lines := len(source.splitlines())) > 400:
        yield f"{lines} lines"


def function_length(path: str, source: str) -> Iterator[str]:
    for node in functions(source):
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > 80:
            yield f"{node.name}: {lines} lines"


def typed_arguments(path: str, source: str) -> Iterator[str]:
    for node in functions(source):
        a = node.args
        arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        yield from (
            f"{node.name}({arg.arg})" for arg in arguments if arg.annotation is None and arg.arg not in ("self", "cls")
        )


def room(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def imports(source: str) -> list[str]:
    """Everything imported anywhere in a file, as dotted names; `from a import b` is `a.b`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            found += [ast.literal_eval(node.args[0])]
    return found


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = ast.walk(ast.parse(source))
    return (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


RULES: list[Callable[[str, str], Iterator[str]]] = [
    layers, doors, randomness, precision, docstring, file_length, function_length, typed_arguments
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule: Callable[[str, str], Iterator[str]]) -> None:
    assert [f"{path}: {fault}" for path, source in FILES.items() for fault in rule(path, source)] == []


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (layers, "diffusion/noise.py", "import mdlm_scale.data.order"),
        (layers, "model/dit.py", "from mdlm_scale import kernels, data"),
        (layers, "data/loader.py", "def f() -> None:\n    from mdlm_scale.model.dit import DiT"),
        (layers, "config.py", "from mdlm_scale.layout import Layout"),
        (layers, "log.py", "from mdlm_scale import config"),
        (layers, "layout.py", "from mdlm_scale import row_kernel"),
        (layers, "run/loop.py", "from mdlm_scale import train"),
        (layers, "train.py", "import mdlm_scale.evaluate"),
        (layers, "run/loop.py", "import mdlm_scale.cellar"),
        (layers, "run/loop.py", "from ..model import dit"),
        (layers, "cellar/wine.py", ""),
        (layers, "model/hf_export.py", "from mdlm_scale.errors import DataError"),
        (doors, "run/main.py", "from omegaconf import OmegaConf"),
        (doors, "model/dit.py", "from flash_attn.ops import triton"),
        (doors, "model/head.py", "from mdlm_scale.row_kernel import softmax_rows"),
        (doors, "kernels.py", "import triton"),
        (doors, "parallel/engine.py", "import importlib\nimportlib.import_module('deepspeed.ops')"),
        (doors, "parallel/plain.py", "from torch.distributed import fsdp"),
        (doors, "data_streaming.py", "import streaming"),
        (doors, "diffusion/noise.py", "import numpy as np"),
        (doors, "model/hf_export.py", "import numpy as np"),
        (randomness, "data/order.py", "import random"),
        (randomness, "data/order.py", "from random import shuffle"),
        (randomness, "run/main.py", "torch.manual_seed(0)"),
        (randomness, "run/main.py", "torch.cuda.manual_seed_all(0)"),
        (randomness, "run/main.py", "torch.Generator()"),
        (randomness, "model/dit.py", "x = torch.randn_like(y)"),
        (randomness, "model/dit.py", "from torch import rand"),
        (randomness, "model/init.py", "weight.data.uniform_(-1, 1)"),
        (randomness, "model/dit.py", "F.dropout(x, 0.1)"),
        (randomness, "model/dit.py", "np.random.default_rng(0)"),
        (randomness, "diffusion/noise.py", "hash('a')"),
        (precision, "model/dit.py", "logits = head(x).float()"),
        (docstring, "run/__init__.py", "x = 1"),
        (docstring, "run/loop.py", ""),
        (file_length, "run/loop.py", "\n" * 401),
        (function_length, "run/loop.py", "def f() -> None:\n" + "    pass\n" * 80),
        (typed_arguments, "run/loop.py", "def f(x: int, y=1) -> None: ..."),
        (typed_arguments, "run/loop.py", "class A:\n    def f(self, *args, **kwargs: int) -> None: ..."),
    ],
)
def test_rule_catches_an_offender(rule: Callable[[str, str], Iterator[str]], path: str, source: str) -> None:
    assert list(rule(path, source)) != []


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (layers, "run/loop.py", "from mdlm_scale.run.step import Report\nimport mdlm_scale"),
        (layers, "layout.py", "from mdlm_scale.config import BatchConfig"),
        (layers, "kernels.py", "from mdlm_scale import row_kernel"),
        (layers, "config.py", "from mdlm_scale.errors import ConfigError"),
        (doors, "parallel/deepspeed.py", "import deepspeed"),
        (doors, "run/metrics.py", "import wandb.errors"),
        (randomness, "model/dit.py", "noise.random_bits(seed, config.dropout)\nself.dropout = noise.uniforms(0)"),
        (precision, "run/evaluate.py", "x.float()"),
        (docstring, "run/__init__.py", ""),
        (typed_arguments, "run/loop.py", "class A:\n    def f(self, x: int, *, y: str) -> None: ..."),
    ],
)
def test_rule_leaves_the_innocent(rule: Callable[[str, str], Iterator[str]], path: str, source: str) -> None:
    assert list(rule(path, source)) == []


def test_package_is_small() -> None:
    assert sum(len(source.splitlines()) for source in FILES.values()) < 9000


def test_files_are_short_in_the_middle() -> None:
    assert statistics.median(len(source.splitlines()) for source in FILES.values() if source) <= 180
