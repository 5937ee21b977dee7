"""Recipes of large models: their headers tell what is computed from them, and they can be built at their real sizes.

What a header says of a number of GPUs is a command; it is taken apart here and its settings are used.
"""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT

from mdlm_scale import config as config_module
from mdlm_scale.config import Config, EngineName
from mdlm_scale.layout import Layout
from mdlm_scale.model.sizes import sizes
from mdlm_scale.parallel.groups import World
from mdlm_scale.run import build, machine, main
from mdlm_scale.run.plan import plan

RECIPES = ["owt_medium", "1b", "3b", "8b"]
GPUS = [8, 64, 512]
BUILD = """
import json, sys, warnings
sys.path[:0] = {paths}
warnings.filterwarnings("ignore")
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from test_recipes import built
from mdlm_scale.parallel import fsdp, tensor
from mdlm_scale.run import build
found = []
for each in built({recipe!r}):
    config, last = each.config, each.num_gpus - 1
    dist.init_process_group("fake", store=FakeStore(), rank=last, world_size=each.num_gpus)
    model = build.build_model(config, config.tokenizer.vocab_size, config.tokenizer.mask_id)
    tp = config.parallel.tp_size
    if tp > 1:
        tensor.cut(model, dist.new_group(list(range(last + 1 - tp, last + 1))), config.parallel.sequence_parallel)
    fsdp._shard(model, fsdp._mesh(torch.device("cpu"), each.layout(last)), config.parallel, torch.bfloat16)
    assert {{p.device.type for p in model.parameters()}} == {{"meta"}}
    found.append({{name: p.to_local().numel() for name, p in model.named_parameters()}})
    dist.destroy_process_group()
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Laid:
    """One line of a header: a command for a number of GPUs."""

    num_gpus: int
    nodes: int
    script: str
    config: Config

    def layout(self, rank: int) -> Layout:
        return build.layout_of(self.config, World(size=self.num_gpus, rank=rank))


def header(recipe: str) -> str:
    text = (ROOT / "configs" / f"{recipe}.yaml").read_text()
    return text[: text.index("\nrun:")]


def layouts(recipe: str) -> list[Laid]:
    found = []
    for num_gpus, command in re.findall(r"^# +(\d+) GPUs\b.*?(sbatch .*)$", header(recipe), re.MULTILINE):
        words = shlex.split(command)
        script = next(word for word in words if word.endswith(".sh"))
        text = (ROOT / script).read_text()
        nodes = words[words.index("-N") + 1] if "-N" in words else re.search(r"--nodes=(\d+)", text)[1]  # type: ignore[index]
        path = words[words.index("--config") + 1] if "--config" in words else re.search(r"configs/\S+", text)[0]  # type: ignore[index]
        config = config_module.load(ROOT / path, [word for word in words if re.match(r"[a-z]+\.\w+=", word)])
        found.append(Laid(int(num_gpus), int(nodes), script, config))
    return found


def built(recipe: str) -> list[Laid]:
    """Those of the header, and one whose matrices are shared by the GPUs of a node."""
    shared = [
        "parallel.engine=fsdp",
        "parallel.tp_size=8",
        "parallel.sequence_parallel=true",
        "batch.micro_batch_size=1",
    ]
    return [*layouts(recipe), Laid(512, 64, "", config_module.load(ROOT / "configs" / f"{recipe}.yaml", shared))]


@pytest.mark.parametrize("recipe", RECIPES)
def test_header_tells_parameters_and_operations(recipe: str) -> None:
    config = config_module.load(ROOT / "configs" / f"{recipe}.yaml")
    assert config.tokenizer.vocab_size is not None
    size = sizes(config.model, config.tokenizer.vocab_size, config.data.length)
    tokens = config.train.num_steps * config.batch.global_batch_size * config.data.length
    told = header(recipe)
    assert f"{size.num_parameters:,} parameters" in told
    assert f"{size.step_flops(2, 1) / 2e9:.1f} GFLOP a token" in told  # half of the tokens are masked
    assert f"{tokens / 1e9:.0f}B tokens" in told


@pytest.mark.parametrize("recipe", RECIPES)
def test_layouts_fit_the_batch(recipe: str) -> None:
    found = layouts(recipe)
    assert [each.num_gpus for each in found] == GPUS
    for each in found:
        assert each.config.run.dir == f"runs/{recipe}"
        assert each.nodes * 8 == each.num_gpus
        assert main.faults(build.with_engine(each.config, each.num_gpus), World(size=each.num_gpus)) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_header_tells_memory(recipe: str) -> None:
    told = re.findall(r"GPUs, +([\d.]+) GB each", header(recipe))
    plans = []
    for each in layouts(recipe):
        config = build.with_engine(each.config, each.num_gpus)
        assert config.tokenizer.vocab_size is not None
        plans.append(plan(config, machine.load("h100"), each.num_gpus, config.tokenizer.vocab_size))
    assert told == [f"{each.peak_bytes / 1e9:.1f}" for each in plans]
    assert all(each.missing_bytes == 0 for each in plans)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_layout_is_built_at_its_real_size(recipe: str) -> None:
    """On the meta device and with process groups that only pretend to talk, as the last rank: what it holds is what
    the layout gives it. Rows are dealt in blocks of equal size, the last ranks' being shorter."""
    program = BUILD.format(paths=[str(ROOT), str(ROOT / "tests")], recipe=recipe)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for each, held in zip(built(recipe), json.loads(done.stdout.splitlines()[-1]), strict=True):
        layout = each.layout(each.num_gpus - 1)
        assert each.config.tokenizer.vocab_size is not None
        places = build.places_of(each.config, each.config.tokenizer.vocab_size, layout)
        assert held.keys() == places.keys()
        first = 0  # elements of the rank that has most
        for name, place in places.items():
            rows = place.shape[0]
            block = -(-rows // layout.shard_size)
            here = max(0, min(block, rows - layout.shard_rank * block))
            assert held[name] == here * place.shape.numel() // rows, name
            first += block * place.shape.numel() // rows
        if each.config.parallel.engine is EngineName.fsdp:
            planned = plan(each.config, machine.load("h100"), each.num_gpus, each.config.tokenizer.vocab_size)
            assert planned.moments["update"]["weights"] == 4 * first


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_settings_train(recipe: str, tmp_path: Path) -> None:
    """All that a recipe says but for its size: two ranks, in bf16, three steps."""
    small = [
        f"run.dir={tmp_path / 'run'}", "data.train=python", "data.validation=python", "data.length=64",
        "tokenizer.name=bytes", "tokenizer.vocab_size=null", "tokenizer.mask_id=null", "train.num_steps=3",
        "model.hidden_size=64", "model.num_layers=2", "model.num_heads=4", "batch.global_batch_size=8",
        "batch.micro_batch_size=2", "evaluate.rows=16",
    ]  # fmt: skip
    if "num_kv_heads" in (ROOT / "configs" / f"{recipe}.yaml").read_text():
        small.append("model.num_kv_heads=2")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mdlm_scale.train"]
    command = [*launch, "--config", str(ROOT / "configs" / f"{recipe}.yaml"), *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "done").is_file()


def test_scripts_name_recipes_that_exist() -> None:
    for script in (ROOT / "slurm").glob("train_*.sh"):
        for name in re.findall(r"configs/\S+\.yaml", script.read_text()):
            assert (ROOT / name).is_file() or name == "configs/mine.yaml", f"{script.name} names {name}"


def test_every_large_recipe_is_listed() -> None:
    large = {path.stem for path in Path(ROOT / "configs").glob("*.yaml") if "block: modern" in path.read_text()}
    assert large <= set(RECIPES)
