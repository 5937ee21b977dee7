"""Plans as a user asks for them: what they say, what they refuse, and that no number is a second formula's."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DEBUG, ROOT

from mdlm_scale import config as config_module
from mdlm_scale import plan as entry
from mdlm_scale.config import Precision
from mdlm_scale.errors import ConfigError
from mdlm_scale.parallel.trace import Operation
from mdlm_scale.parallel.traffic import Traffic
from mdlm_scale.run import machine as machine_module
from mdlm_scale.run.machine import Machine
from mdlm_scale.run.plan import Plan, plan

LARGE = str(ROOT / "configs" / "8b.yaml")
Ask = Callable[..., tuple[int, str, str]]

MACHINE = Machine(
    tflops_bf16=100.0, tflops_float32=10.0, memory_gb=10.0, memory_gbps=1000.0, per_node=8, node_gbps=100.0,
    network_gbps=10.0, usable=0.9, product=0.5, attention=0.25, rest=0.8, links=0.5, hidden=0.5, fused=0.25,
    operation_us=5.0, exchange_us=20.0,
)  # fmt: skip


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """`ask("--gpus", "8", ...)`: exit code, standard output, standard error."""

    def asked(*arguments: str, config: str = DEBUG, gpu: str = "h100") -> tuple[int, str, str]:
        capsys.readouterr()
        code = entry.main(["--config", config, "--gpu", gpu, *arguments])
        return code, *capsys.readouterr()

    return asked


def test_a_plan_is_one_screen_and_json(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, out, err = ask("--gpus", "64", "--json", str(file), "parallel.replicate_size=8", config=LARGE)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 140
    told = json.loads(file.read_text())
    assert told["num_parameters"] == 7_989_378_386
    assert told["peak_bytes"] == max(sum(moment.values()) for moment in told["moments"].values())
    assert {(each["group"], each["link"]) for each in told["exchanges"]} == {("dp", "node"), ("replicas", "network")}
    assert told["step_seconds"] == pytest.approx(sum(told["seconds"].values()))
    assert told["gpu_hours"] == pytest.approx(64 * 24 * told["days"])
    assert 0 < told["mfu"] < 1
    for said in ("7,989,378,386 parameters", "replicas all-reduce", f"MFU {told['mfu']:.1%}", "fits"):
        assert said in out


def test_twice_the_gpus_take_half_the_time(ask: Ask, tmp_path: Path) -> None:
    """Where exchanges hide behind the passes."""
    days = []
    for gpus in ("8", "16"):
        assert ask("--gpus", gpus, "--json", str(tmp_path / "plan.json"), config=LARGE)[0] == 0
        days.append(json.loads((tmp_path / "plan.json").read_text())["days"])
    assert days[1] == pytest.approx(days[0] / 2, rel=0.01)


def test_what_does_not_fit_is_told_with_what_would(ask: Ask) -> None:
    code, out, err = ask("--gpus", "8", "parallel.engine=deepspeed", "parallel.zero_stage=1", config=LARGE)
    assert code == 2
    assert "DOES NOT FIT" in out
    assert err.startswith("ConfigError: This layout does not fit h100: 1")
    assert "more than can be used. These fit, the fastest first:\n  parallel." in err
    advice = err.splitlines()[1].split()
    code, out, err = ask(
        "--gpus", "8", "parallel.engine=deepspeed", "parallel.zero_stage=1", *advice, config=LARGE
    )  # fmt: skip
    assert (code, err) == (0, "")


def test_search_ranks_what_fits_and_says_why_others_do_not(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "search.json"
    code, out, err = ask("--gpus", "4", "--search", "--json", str(file), config=str(ROOT / "configs" / "3b.yaml"))
    assert (code, err) == (0, "")
    assert len(out.splitlines()) < 40
    told = json.loads(file.read_text())
    seconds = [each["step_seconds"] for each in told["fitting"]]
    assert seconds == sorted(seconds)
    assert all(each["peak_bytes"] <= each["usable_bytes"] for each in told["fitting"])
    assert {each["settings"]["parallel.engine"] for each in told["fitting"]} == {"fsdp", "deepspeed"}
    assert {each["settings"]["parallel.tp_size"] for each in told["fitting"]} == {1, 2, 4}
    assert all("GB" in row["reason"] and "too many" in row["reason"] for row in told["refused"])
    # each layout with its next larger micro-batch is refused, or the batch ends
    names = {json.dumps(each["settings"]) for each in told["fitting"]}
    assert names.isdisjoint(json.dumps(row["settings"]) for row in told["refused"])


def test_a_search_without_a_fit_ends_as_a_mistake(ask: Ask) -> None:
    code, out, err = ask("--gpus", "1", "--search", config=LARGE)
    assert code == 2
    assert err == "ConfigError: No layout of 1 x h100 fits: take more, or larger ones.\n"
    assert "fit with no micro-batch" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "3"], "batch.global_batch_size=32 is not a multiple of micro_batch_size * dp_size"),
        (["--gpus", "2", "parallel.tp_size=4"], "2 ranks cannot be laid out as"),
        (["--gpus", "2", "model.num_heads=5"], "model.num_heads=5 does not divide model.hidden_size=64"),
        (["--gpus", "2", "--json", "no/such/folder/plan.json"], "--json no/such/folder/plan.json cannot be written"),
        (
            ["--gpus", "2", "parallel.engine=fsdp", "parallel.cpu_offload=true"],
            "parallel.cpu_offload: what is offloaded",
        ),
    ],
)
def test_mistakes_are_told_at_once(ask: Ask, arguments: list[str], said: str) -> None:
    code, out, err = ask(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"ConfigError: {said}"), err


def test_an_unknown_gpu_is_told_with_those_known(ask: Ask) -> None:
    code, _, err = ask("--gpus", "1", gpu="h1000")
    assert code == 2
    assert err.startswith(
        "ConfigError: --gpu h1000 is not known. Known are cpu, a100, h100, h200, b200; a new one is an "
    )
    assert "configs/plan/gpus.yaml" in err


def test_no_gpus_are_refused(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        ask("--gpus", "0")
    assert "--gpus 0 must be at least 1" in capsys.readouterr().err


def test_every_machine_is_complete() -> None:
    names = config_module.entries(machine_module.FILE, Machine)
    assert {"cpu", "a100", "h100"} <= names.keys()
    for name in names:
        assert machine_module.load(name).usable_bytes > 0


def test_faults_of_a_machine_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gpus.yaml"
    monkeypatch.setattr(machine_module, "FILE", file)
    file.write_text("new:\n  tflops_bf16: 100\n  memry_gb: 80\n  per_node: many\n")
    with pytest.raises(ConfigError) as raised:
        machine_module.load("new")
    assert len(raised.value.faults) == 2
    assert "new.memry_gb is not a setting. Did you mean new.memory_gb?" in str(raised.value)
    file.write_text("new:\n  tflops_bf16: 100\n")
    with pytest.raises(ConfigError, match=r"new\.memory_gb=0\.0 must be above 0"):
        machine_module.load("new")


def test_an_operation_takes_as_long_as_its_slowest_part() -> None:
    product, copy, tiny = Operation("product", 10**12, 10**6), Operation("rest", 0, 8 * 10**9), Operation("rest", 0, 8)
    wide = Operation("product", 10**6, 8 * 10**9)  # its bytes take longer
    found = MACHINE.seconds({product: 2, copy: 3, tiny: 4, wide: 1}, Precision.bf16, compiled=False)
    assert found == pytest.approx({"product": 2 * 0.02 + 0.01, "attention": 0.0, "rest": 3 * 0.01 + 4 * 5e-6})
    compiled = MACHINE.seconds({product: 2, copy: 3}, Precision.bf16, compiled=True)
    assert compiled == pytest.approx({"product": 0.04, "attention": 0.0, "rest": 0.0075})
    attention = MACHINE.seconds({Operation("attention", 10**12, 1): 1}, Precision.float32, compiled=False)
    assert attention["attention"] == pytest.approx(0.4)


def test_rings_use_every_link_they_have() -> None:
    assert MACHINE.bandwidth(size=8, stride=1) == 100  # a node
    assert MACHINE.bandwidth(size=64, stride=1) == 80  # all eight ranks of a node send over the network
    assert MACHINE.bandwidth(size=8, stride=8) == 10  # one does
    assert MACHINE.bandwidth(size=16, stride=4) == 20
    assert replace(MACHINE, network_gbps=50.0).bandwidth(size=64, stride=1) == 100  # no faster than inside
    seconds = MACHINE.exchange_seconds("all-reduce", Traffic(10, 8 * 10**9), size=8, stride=8)
    assert seconds == pytest.approx(10 * 20e-6 * math.log2(8) + 2 * 8 * 7 / 8 / (10 * 0.5))


def test_exchanges_hide_behind_the_passes_where_the_engine_lets_them() -> None:
    config = config_module.load(LARGE, ["parallel.zero_stage=3", "parallel.engine=deepspeed", "parallel.compile=false"])
    slow = replace(MACHINE, memory_gb=1000.0, network_gbps=0.5)

    def waits(stage: int, hidden: float) -> float:
        own = replace(config, parallel=replace(config.parallel, zero_stage=stage))
        return plan(own, replace(slow, hidden=hidden), 64, 50258).seconds["data parallelism"]

    assert waits(3, 1e-9) > waits(3, 0.5)
    assert waits(1, 1e-9) == waits(1, 0.5) > 0


def test_replicas_exchange_behind_the_last_micro_batch_alone() -> None:
    """So what they take and it does not is waited for, however many micro-batches there are."""
    config = config_module.load(LARGE, ["parallel.replicate_size=8"])
    slow = replace(MACHINE, memory_gb=1000.0, network_gbps=0.1, node_gbps=1e6, exchange_us=1e-6, hidden=0.5)

    def planned(num_micro: int) -> Plan:
        return plan(replace(config, batch=replace(config.batch, global_batch_size=64 * num_micro)), slow, 64, 50258)

    one, four = planned(1), planned(4)
    (replicas,) = (each.seconds for each in four.exchanges if each.group == "replicas")
    assert replicas == next(each.seconds for each in one.exchanges if each.group == "replicas")
    assert one.seconds["data parallelism"] > 0.1 * replicas
    assert four.seconds["data parallelism"] == pytest.approx(one.seconds["data parallelism"], rel=1e-3)


def test_help_comes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        entry.main(["--help"])
    assert "--search" in capsys.readouterr().out


def numbers(tree: Any) -> list[float]:
    if isinstance(tree, dict):
        return [n for value in tree.values() for n in numbers(value)]
    if isinstance(tree, list):
        return [n for value in tree for n in numbers(value)]
    return [tree] if isinstance(tree, int | float) else []


def test_json_has_no_number_that_is_none(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert ask("--gpus", "2", "--json", str(file), "parallel.engine=fsdp", "parallel.tp_size=2")[0] == 0
    assert all(math.isfinite(n) for n in numbers(json.loads(file.read_text())))
