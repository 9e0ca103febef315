"""Triton's kernels of experts: interpreted, compiled for absent GPUs, and what they launch."""

from __future__ import annotations

import pytest
import torch

from . import moe_compiled, moe_interpreted, workers
from .rows_compiled import kernel, recorded

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """What the interpreter's processes found."""
    return workers.in_processes("moe_interpreted", TRITON_INTERPRET="1", PYTHONWARNINGS="ignore")


@pytest.fixture(scope="module")
def compiled() -> dict[str, str | None]:
    """What the compiling processes found; Triton's cache is kept between runs."""
    return workers.in_processes(
        "moe_compiled", TRITON_CACHE_DIR=str(workers.ROOT / ".cache" / "triton")
    )


@pytest.mark.timeout(900)  # the first of them waits for all
@pytest.mark.parametrize("check", moe_interpreted.checks())
def test_interpreted(interpreted: dict[str, str | None], check: str) -> None:
    assert check in interpreted, f"not run; there are {len(interpreted)}"
    assert interpreted[check] is None, interpreted[check]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", moe_compiled.checks())
def test_compiles(compiled: dict[str, str | None], check: str) -> None:
    assert check in compiled, f"not run; there are {len(compiled)}"
    assert compiled[check] is None, compiled[check]


def test_a_router_launches_once_and_repeats_its_variant() -> None:
    logits = torch.zeros(9, 128, dtype=torch.bfloat16)
    with recorded() as found:
        for rows in (logits, logits[:3], logits[:, 1:]):
            kernel("topk_softmax")(rows, 8)
    first, again, unaligned = (launch.variant for launch in found)
    assert again is first
    assert unaligned is not first
