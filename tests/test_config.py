"""Settings: what overrides what, that every fault is told at once, and that the recipes are the paper's."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mdlm_scale import config as config_module
from mdlm_scale.config import Config, EngineName, TimeSampling, WandbMode
from mdlm_scale.errors import ConfigError
from mdlm_scale.parallel.groups import World
from mdlm_scale.run.main import faults

RECIPES = Path(__file__).parents[1] / "configs"

OF_EVERY_RECIPE = {
    "model.hidden_size": 768, "model.num_layers": 12, "model.num_heads": 12, "model.cond_size": 128,
    "model.dropout": 0.1, "model.time_conditioning": False,
    "diffusion.schedule": "loglinear", "diffusion.e": 1e-3, "diffusion.t_min": 1e-3, "diffusion.weight": "elbo",
    "batch.global_batch_size": 512,
    "optimizer.lr": 3e-4, "optimizer.beta1": 0.9, "optimizer.beta2": 0.999, "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.0, "optimizer.warmup_steps": 2500, "optimizer.schedule": "constant",
    "optimizer.max_grad_norm": 1.0,
    "ema.decay": 0.9999, "train.num_steps": 1_000_000, "train.precision": "bf16",
}  # fmt: skip

OF_ONE_RECIPE = {
    "owt_small": ("gpt2", 50258, 50257, 1024),
    "lm1b_small": ("bert-base-uncased", 30522, 103, 128),
    "text8_small": ("text8", 35, 4, 256),
}

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def from_text(text: str, *overrides: str) -> Config:
        path = tmp_path / "some.yaml"
        path.write_text(text)
        return config_module.load(path, overrides)

    return from_text


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}


def recipe_table(recipe: str) -> dict[str, Any]:
    keys = ("tokenizer.name", "tokenizer.vocab_size", "tokenizer.mask_id", "data.length")
    return OF_EVERY_RECIPE | dict(zip(keys, OF_ONE_RECIPE[recipe], strict=True))


def test_empty_file_gives_the_defaults(load: Load) -> None:
    assert load("") == Config()


def test_file_overrides_defaults(load: Load) -> None:
    assert load("model: {hidden_size: 64}").model.hidden_size == 64


def test_command_line_overrides_the_file(load: Load) -> None:
    assert load("model: {hidden_size: 64}", "model.hidden_size=32").model.hidden_size == 32


def test_override_leaves_the_neighbours(load: Load) -> None:
    assert load("model: {hidden_size: 64}", "model.num_heads=2").model.hidden_size == 64


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_free_of_faults(path: Path) -> None:
    assert faults(config_module.load(path), World()) == []


@pytest.mark.parametrize("recipe", OF_ONE_RECIPE)
def test_recipe_is_the_papers(recipe: str) -> None:
    loaded = flat(config_module.to_tree(config_module.load(RECIPES / f"{recipe}.yaml")))
    wanted = recipe_table(recipe)
    assert {key: loaded[key] for key in wanted} == wanted


@pytest.mark.parametrize("recipe", OF_ONE_RECIPE)
def test_recipe_writes_its_numbers_out(recipe: str) -> None:
    """A default that changes must not change a recipe."""
    written = flat(yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text()))
    assert recipe_table(recipe).keys() - written.keys() == set()


@pytest.mark.parametrize("recipe", OF_ONE_RECIPE)
def test_recipe_says_how_to_run_it(recipe: str) -> None:
    command = f"python -m mdlm_scale.train --config configs/{recipe}.yaml"
    assert command in (RECIPES / f"{recipe}.yaml").read_text()


def test_all_faults_come_at_once(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load("model: {droput: 0.1, dropout: abc}\nrun: {sed: 1}")
    assert all(key in str(caught.value) for key in ("3 faults", "model.droput", "model.dropout='abc'", "run.sed"))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("model: {hiden_size: 64}", "Did you mean model.hidden_size?"),
        ("optimiser: {lr: 1}", "Did you mean optimizer?"),
        ("model: {length: 64}", "Did you mean data.length?"),
        ("lr: 1", "Did you mean optimizer.lr?"),
        ("run: {xyz: 1}", "There are: dir, seed, init_from."),
    ],
)
def test_unknown_key_names_the_likely_one(load: Load, text: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value).endswith(meant)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.num_steps=1.5", "a whole number"),
        ("train.num_steps=true", "a whole number"),
        ("train.num_steps=[1]", "a whole number"),
        ("train.num_steps=", "a whole number"),
        ("run.seed='1'", "a whole number"),
        ("tokenizer.vocab_size=many", "a whole number"),
        ("optimizer.lr=abc", "a number"),
        ("optimizer.lr=true", "a number"),
        ("model.time_conditioning=1", "true or false"),
        ("run.dir=3", "text"),
        ("train.precision=fp8", "one of bf16, float32, float64"),
        ("train.precision=[bf16]", "one of bf16, float32, float64"),
        ("diffusion.time_sampling=false", "one of lattice, stratified, iid"),
        ("model=3", "`key: value` pairs"),
    ],
)
def test_wrong_type_names_the_right_one(load: Load, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("", override)
    assert re.search(rf"{re.escape(override.split('=')[0])}.* must (be|hold) {re.escape(expected)}", str(caught.value))


MIXTURE = "data: {train: {data/here: 2, 's3://bucket/there': 0.5}}"


def test_mixture_is_addresses_and_weights(load: Load) -> None:
    assert load(MIXTURE).data.train == {"data/here": 2.0, "s3://bucket/there": 0.5}


def test_mixture_is_written_as_it_was_read(load: Load) -> None:
    assert load(config_module.to_yaml(load(MIXTURE))) == load(MIXTURE)


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        (MIXTURE, "data.train=some/folder", "some/folder"),
        ("data: {train: some/folder}", "data.train={here: 1, there: 2}", {"here": 1.0, "there": 2.0}),
        (MIXTURE, "data.train={elsewhere: 1}", {"elsewhere": 1.0}),
    ],
    ids=["mixture by path", "path by mixture", "mixture by mixture"],
)
def test_override_takes_the_place_of_a_mixture(
    load: Load, text: str, override: str, expected: str | dict[str, float]
) -> None:
    assert load(text, override).data.train == expected


@pytest.mark.parametrize("weight", ["many", "true", "[1]", "{x: 1}", ".inf", "null"])
def test_wrong_weight_of_a_mixture_is_named(load: Load, weight: str) -> None:
    """And not the right one beside it."""
    with pytest.raises(ConfigError, match=r"data\.train.*wrong.*must be a number") as caught:
        load(f"data: {{train: {{right: 1, wrong: {weight}}}}}")
    assert "right" not in str(caught.value)


@pytest.mark.parametrize("value", ["3", "null", "[here, there]"])
def test_data_that_is_neither_address_nor_mixture_is_refused(load: Load, value: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.train.* must be text"):
        load("", f"data.train={value}")


def test_list_in_the_place_of_a_mixture_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError):
        load(MIXTURE, "data.train=[here]")


def test_validation_is_no_mixture(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation.* must be text"):
        load("data: {validation: {here: 1}}")


@pytest.mark.parametrize("number", ["1e6", "1_000_000", "1000000.0"])
def test_whole_number_may_be_written_as_a_float(load: Load, number: str) -> None:
    num_steps = load(f"train: {{num_steps: {number}}}").train.num_steps
    assert repr(num_steps) == "1000000"


def test_none_takes_back_an_expectation(load: Load) -> None:
    assert load("tokenizer: {mask_id: 3}", "tokenizer.mask_id=null").tokenizer.mask_id is None


@pytest.mark.parametrize("overrides", [[], ["logging.wandb=off"]], ids=["file", "override"])
def test_bare_off_is_off(load: Load, overrides: list[str]) -> None:
    """YAML reads `off` as false."""
    assert load("logging: {wandb: off}", *overrides).logging.wandb is WandbMode.off


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config file '.*absent\.yaml'"):
        config_module.load(tmp_path / "absent.yaml")


@pytest.mark.parametrize("text", ["model: {a: [1", "\tmodel: 1", "a: 1\na: 2", "- model\n- data\n", "3"])
def test_file_that_is_no_config_is_refused(load: Load, text: str) -> None:
    with pytest.raises(ConfigError, match=r"some\.yaml"):
        load(text)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_bytes(b"\xff\xfe\x00\xff")
    with pytest.raises(ConfigError, match=r"some\.yaml cannot be read"):
        config_module.load(path)


def test_overrides_without_equals_are_all_named(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"(?s)'--fast'.*'model\.dropout'"):
        load("", "--fast", "model.dropout")


@pytest.mark.parametrize("recipe", [None, *OF_ONE_RECIPE])
def test_written_config_loads_as_itself(load: Load, recipe: str | None) -> None:
    config = config_module.load(RECIPES / f"{recipe}.yaml") if recipe else Config()
    assert load(config_module.to_yaml(config)) == config


def test_loaded_values_are_typed(load: Load) -> None:
    loaded = load("diffusion: {time_sampling: iid}\nparallel: {engine: plain}")
    assert (loaded.diffusion.time_sampling, loaded.parallel.engine) == (TimeSampling.iid, EngineName.plain)


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=1", "model.num_layers=3", "model.dropout=0", "tokenizer.name=text8", "batch.global_batch_size=64",
        "data.length=64", "data.block_shards=2", "diffusion.time_sampling=iid", "optimizer.lr=1", "ema.decay=0.5",
    ],
)  # fmt: skip
def test_another_meaning_is_named(load: Load, override: str) -> None:
    differences = config_module.changes_of_meaning(load(""), load("", override))
    assert [difference.split(":")[0] for difference in differences] == [override.split("=")[0]]


@pytest.mark.parametrize(
    "override",
    [
        "run.dir=elsewhere", "data.train=elsewhere", "data.train={here: 1, there: 2}", "data.validation=elsewhere",
        "data.prefetch=9", "data.cache_dir=elsewhere", "data.cache_mb=1", "batch.micro_batch_size=2",
        "parallel.recompute=full",
        "train.num_steps=7", "evaluate.every=3", "checkpoint.keep=5", "guard.max_skips=3", "logging.every=1",
        "logging.wandb=offline",
    ],
)  # fmt: skip
def test_manner_of_running_is_no_meaning(load: Load, override: str) -> None:
    assert config_module.changes_of_meaning(load(""), load("", override)) == []


def test_every_setting_is_explained() -> None:
    """The comment behind a setting is its only documentation; the sections of `Config` are their classes' names."""
    source = inspect.getsource(config_module)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    explained = {t.start[0] for t in tokens if t.type == tokenize.COMMENT and t.string.strip("# ")}
    classes = [c for c in ast.parse(source).body if isinstance(c, ast.ClassDef) and c.name.endswith("Config")]
    settings = [(c.name, s) for c in classes for s in c.body if isinstance(s, ast.AnnAssign) and c.name != "Config"]
    assert len(settings) > 40
    bare = [(name, s) for name, s in settings if explained.isdisjoint(range(s.lineno, (s.end_lineno or 0) + 1))]
    assert [f"{name}.{ast.unparse(s.target)}" for name, s in bare] == []
