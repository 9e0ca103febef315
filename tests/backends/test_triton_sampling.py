"""Triton's filters of probabilities and draws: interpreted, compiled for absent GPUs, run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops import ops
from torch_ops.platform import Platform

from . import sampling_compiled, sampling_interpreted, workers
from .rows_compiled import kernel, recorded

pytest.importorskip("triton", reason="triton is not installed")
OPS = sampling_interpreted.OPS
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """What the interpreter's processes found."""
    flags = {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    return workers.in_processes("sampling_interpreted", **flags)


@pytest.fixture(scope="module")
def compiled() -> dict[str, str | None]:
    """What the compiling processes found; Triton's cache is kept between runs."""
    cache = str(workers.ROOT / ".cache" / "triton")
    return workers.in_processes("sampling_compiled", TRITON_CACHE_DIR=cache)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", sampling_interpreted.checks())
def test_interpreted(interpreted: dict[str, str | None], check: str) -> None:
    assert check in interpreted, f"not run; there are {len(interpreted)}"
    assert interpreted[check] is None, interpreted[check]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", sampling_compiled.checks())
def test_compiles(compiled: dict[str, str | None], check: str) -> None:
    assert check in compiled, f"not run; there are {len(compiled)}"
    assert compiled[check] is None, compiled[check]


@pytest.mark.parametrize("platform", [Platform.cuda((8, 0)), Platform.rocm("gfx942")], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_chosen_on_gpus_without_importing_a_kernel(op: str, platform: Platform) -> None:
    spec = torch_ops.select_kernel(op, "triton", platform=platform)
    assert spec.target == f"torch_ops.backends.triton.{op}:{op}"


def _arguments(op: str, probs: Tensor) -> tuple[Tensor, ...]:
    numbers = torch.zeros(len(probs))
    made: dict[str, Any] = {
        "k": numbers.int(), "p": numbers, "min_p": numbers, "seed": numbers.long(),
        "offset": numbers.long(),
    }  # fmt: skip
    names = list(getattr(ops, op).declaration.signature.parameters)[1:]
    return (probs, *(made[name].clone() for name in names))


@pytest.mark.parametrize("op", OPS)
def test_a_repeated_call_launches_the_same_and_looks_at_alignment_again(op: str) -> None:
    flat = torch.zeros(5 * 96 + 1)
    aligned, shifted = flat[:-1].view(5, 96), flat[1:].view(5, 96)
    with recorded() as launches:
        for probs in (aligned, aligned, shifted, aligned):
            args = _arguments(op, probs)
            kernel(op)(*args)
            given = [v for v in launches[-1].values if isinstance(v, Tensor)]
            assert (probs is given[0]) == (probs is aligned)
            for number in args[1:]:
                assert any(value is number for value in given)
    assert len({id(launch.variant) for launch in launches}) == 1
    assert launches[2].values[0].data_ptr() % 16 == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("columns", [5, 4096, 32000, 128256, 262144])
@pytest.mark.parametrize("op", OPS)
def test_a_gpu_gives_the_bits_of_the_reference(device: torch.device, op: str, columns: int) -> None:
    probs = sampling_interpreted.rows(columns)
    for first in range(0, len(sampling_interpreted.K), 2):
        sampling_interpreted.same(op, probs.to(device), first)


@pytest.mark.gpu
@needs_gpu
def test_offsets_beyond_32_bits(device: torch.device) -> None:
    probs = torch.zeros(8400, 262144, device=device)
    probs[-1, -1] = 1.0
    assert probs.numel() > 2**31
    k = torch.ones(len(probs), dtype=torch.int32, device=device)
    out = ops.top_k_renorm_probs(probs, k, backend="triton")
    assert out[-1, -1] == 1.0
    assert out.sum() == 1.0
