"""Triton's products of quantized matrices: interpreted, compiled for absent GPUs, and refused."""

from __future__ import annotations

import importlib

import pytest
import torch

import torch_ops
from torch_ops.testing.proofs._scaled_mm import ROW, TENSOR, plain
from torch_ops.testing.registered import registered

from . import examples, products_compiled, workers
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_large_products_on_hopper(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Tiles that are partly outside, several of a program, and small calls taken as large."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel runs on sm_90 alone")
    op, kind = "scaled_mm_fp8", "float8_e4m3fn"
    module = importlib.import_module("torch_ops.backends.triton._scaled_mm")
    hopper = importlib.import_module("torch_ops.backends.triton._scaled_mm_hopper")
    monkeypatch.setattr(hopper, "_FEWEST_TILES", 1)
    module._launches.clear()
    sizes = (
        (1, 8, 16), (255, 136, 128), (256, 128, 144), (257, 1032, 4112), (3000, 1800, 272),
        (2560, 4104, 1040), (700, 9000, 512),
    )  # fmt: skip
    own = [
        plain(op, kind, {"m": m, "n": n, "k": k, "form_a": a, "form_b": b}, dtype, bias=bool(i % 2))
        for i, (m, n, k) in enumerate(sizes)
        for a, b in ((ROW, ROW), (TENSOR, ROW), (ROW, TENSOR), (TENSOR, TENSOR))[i % 2 :: 2]
    ]
    own += examples.covering(op, dtype)
    subject = registered(op, "triton")
    try:
        examples.examine(subject, op, own, device="cuda")
        examples.examine(subject, op, examples.special(op, dtype), device="cuda", laws=False)
        large = [made for made in module._launches.values() if isinstance(made, hopper.Large)]
        assert len(large) >= len(sizes)
    finally:
        module._launches.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_large_products_of_other_dtypes_and_places_have_launches_of_their_own() -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(n, 1040, device="cuda").to(torch.float8_e4m3fn) for n in (2560, 2048))
    scales = torch.rand(2561, device="cuda") + 0.5
    bias = torch.randn(2049, device="cuda")
    exact = a.double() @ b.double().t()
    for out in (torch.bfloat16, torch.float32):
        for added in (None, bias[:-1], bias[1:], bias[:-1].half()):
            for skip in (0, 1):  # scales that start at 16 bytes, and that don't
                left, right = scales[skip : 2560 + skip, None], scales[None, skip : 2048 + skip]
                got = torch_ops.ops.scaled_mm_fp8(
                    a, b.t(), left, right, out, added, backend="triton"
                )
                wanted = exact * left.double() * right.double()
                wanted = wanted if added is None else wanted + added.double()
                torch.testing.assert_close(got.double(), wanted, atol=2.0, rtol=2e-2)
