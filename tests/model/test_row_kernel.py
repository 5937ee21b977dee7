"""The Triton kernel of the head where there is no GPU: in Triton's interpreter, and compiled for three kinds of GPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mdlm_scale import kernels

TESTS = Path(__file__).with_name("interpreted_row_kernel.py")
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: bash tools/install.sh --test"
)


def test_the_head_computes_the_same_with_the_kernel() -> None:
    """In a process of its own: whether Triton interprets or compiles is settled when it is imported."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(("dtype", "wide"), [("bf16", "fp32"), ("fp32", "fp32")], ids=["bf16", "float32"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_for_a_gpu_it_stays_in_registers(capability: int, dtype: str, wide: str, tmp_path: Path) -> None:
    """Read from the binary: no stack, no local memory, and rows go by 16 bytes an access."""
    binary = compiled(capability, dtype, wide, tmp_path)
    assert (bytes_of("STACK", binary), bytes_of("LOCAL", binary)) == (0, 0)
    instructions = dumped("-sass", binary)
    assert not re.search(r"\b(STL|LDL)\b", instructions)  # stores to and loads from local memory: spills
    assert set(re.findall(r"\b(?:LDG|STG)\.E\.128\b", instructions)) == {"LDG.E.128", "STG.E.128"}


def test_a_kernel_that_spills_is_seen(tmp_path: Path) -> None:
    """Eight times the columns for as many threads do not fit their registers."""
    binary = compiled(80, "fp64", "fp64", tmp_path, tiles=8)
    assert bytes_of("STACK", binary) > 0
    assert re.search(r"\b(STL|LDL)\b", dumped("-sass", binary))


def compiled(capability: int, dtype: str, wide: str, folder: Path, tiles: int = 1) -> Path:
    """What a GPU of this capability runs: tensors begin at 16 bytes, and so does each row."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mdlm_scale import row_kernel

    pointers = dict.fromkeys(("logits_RV", "bias_V"), f"*{dtype}") | {"column_R": "*i64"}
    pointers |= dict.fromkeys(("max_R", "sum_R", "target_R"), f"*{wide}")
    constants = {"lowest": torch.finfo(torch.float32).min, "tile": tiles * row_kernel.TILE}
    signature = pointers | {"width": "i32"} | dict.fromkeys(constants, "constexpr")
    assert kernels.ROW_MULTIPLE % 16 == 0
    divisible = {(position,): [["tt.divisibility", 16]] for position in range(len(pointers) + 1)}
    source = ASTSource(row_kernel.softmax_row, signature, constants, divisible)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        done = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": row_kernel.NUM_WARPS})
    binary = folder / "kernel.cubin"
    binary.write_bytes(done.asm["cubin"])
    return binary


def bytes_of(what: str, binary: Path) -> int:
    """Of the kernel, beside a binary's own overhead."""
    of_kernel = dumped("--dump-resource-usage", binary).split("softmax_row")[1]
    return int(re.search(rf"\b{what}:(\d+)\b", of_kernel)[1])


def dumped(what: str, binary: Path) -> str:
    """From NVIDIA's tool, which comes with Triton."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    return subprocess.run([tool, what, binary], capture_output=True, text=True, check=True, timeout=60).stdout
