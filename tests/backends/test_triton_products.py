"""Triton's products of quantized matrices: interpreted, compiled for absent GPUs, and refused."""

from __future__ import annotations

import importlib

import pytest
import torch

import torch_ops

from . import products_compiled, workers
from .products_compiled import launches
from .rows_compiled import compiled as compiled_for

pytest.importorskip("triton", reason="triton is not installed")
CACHE = str(workers.ROOT / ".cache" / "triton")


@pytest.fixture(scope="module")
def compiled() -> dict[str, str | None]:
    """What the compiling processes found; Triton's cache is kept between runs."""
    return workers.in_processes("products_compiled", TRITON_CACHE_DIR=CACHE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", products_compiled.checks())
def test_compiles(compiled: dict[str, str | None], check: str) -> None:
    assert check in compiled, f"not run; there are {len(compiled)}"
    assert compiled[check] is None, compiled[check]


def test_parts_of_matrices_are_loaded_ahead() -> None:
    """Copies of 16 bytes that aren't waited for at once."""
    aligned = launches("sm_90", "fp8", 300)[0]
    text = compiled_for(aligned, "sm_90").asm["ttgir"]
    assert text.count("ttg.async_copy_global_to_local") >= 2
    assert "ttg.async_wait" in text


def test_what_float8_needs() -> None:
    module = importlib.import_module("torch_ops.backends.triton._scaled_mm")
    assert module._float8("sm_80") == ()
    assert module._float8("sm_89") == module._float8("gfx950") == (torch.float8_e4m3fn,)
    assert module._float8("gfx942") == (torch.float8_e4m3fnuz,)


def test_an_ampere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch_ops.backends.triton._scaled_mm")
    monkeypatch.setattr(module, "arch_of", lambda _: "sm_80")
    monkeypatch.setattr(module, "INTERPRETED", False)
    module.refusal.cache_clear()
    try:
        reason = module.refusal(torch.float8_e4m3fn, 0)
    finally:
        module.refusal.cache_clear()
    assert reason == "a dtype torch.float8_e4m3fn on sm_80 (supported: none before sm_89)"


@pytest.mark.parametrize("op", ["scaled_mm_fp8", "scaled_mm_int8"])
def test_a_cpu_is_refused(op: str) -> None:
    dtype = torch.int8 if op.endswith("int8") else torch.float8_e4m3fn
    a, b = torch.zeros(2, 16).to(dtype), torch.zeros(8, 16).to(dtype).t()
    with pytest.raises(torch_ops.BackendUnavailableError, match="triton"):
        getattr(torch_ops.ops, op)(
            a, b, torch.ones(()), torch.ones(()), torch.float32, backend="triton"
        )
