"""FlashInfer's product of float8 without FlashInfer: what it takes, and what it hands over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_ops import limits
from torch_ops.once import KernelLoadError
from torch_ops.testing.draw import FLOATS
from torch_ops.testing.proof import proof_of
from torch_ops.testing.proofs._scaled_mm import TENSOR, plain
from torch_ops.testing.spec import Spec

from . import examples
from .arguments import BRAIN, FULL, HALF, off
from .model_flashinfer import HANDLE, Model

OP = "scaled_mm_fp8"
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
SIZES = ((1, 16, 16), (3, 32, 48), (16, 64, 128), (33, 144, 64), (129, 16, 272), (1, 512, 256))
WHOLE = {"form_a": TENSOR, "form_b": TENSOR}
one = torch.ones(1)


def run(*args: Any) -> torch.Tensor:
    product: torch.Tensor = examples.loaded(OP, "flashinfer").function(*args)
    return product


def eight(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.uint8).view(dtype)


a, b = eight(3, 64), eight(32, 64).t()


def products() -> list[Spec]:
    """Give examples of one scale for each matrix, which it takes all of."""
    kind = "float8_e4m3fn"
    return [plain(OP, kind, {"m": m, "n": n, "k": k, **WHOLE}, "bfloat16") for m, n, k in SIZES]


def test_right_where_it_is_taken(flashinfer: Model) -> None:
    subject = examples.direct(OP, "flashinfer")
    own = products()
    assert examples.examine(subject, OP, own).executed == len(own)
    assert examples.examine(subject, OP, proof_of(OP).small_named("bfloat16")).executed
    examples.examine(subject, OP, examples.covering(OP, "bfloat16"), laws=False)
    examples.examine(subject, OP, examples.special(OP, "bfloat16"), laws=False)
    assert flashinfer.built == ["gemm"]
    assert set(flashinfer.called) == {("bmm_fp8", HANDLE)}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scales_of_every_shape(flashinfer: Model, shape: tuple[int, ...]) -> None:
    scale = torch.full(shape, 0.5)
    wanted = (a.float() @ b.float() * 0.25).bfloat16()
    assert torch.equal(run(a, b, scale, scale, BRAIN), wanted)


def test_nothing_is_loaded_for_nothing(flashinfer: Model) -> None:
    for sizes in ((0, 32), (3, 0), (0, 0)):
        args = a[: sizes[0]], b[:, : sizes[1]], one, one, BRAIN
        assert examples.refusal(OP, "flashinfer", *args) is None
        assert run(*args).shape == sizes
    assert not flashinfer.built


def test_the_current_device_is_that_of_the_matrices(
    flashinfer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *raised: object) -> None:
            entered.append(-1)

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1)
    run(a, b, one, one, BRAIN)
    assert entered == [1, -1]
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    run(a, b, one, one, BRAIN)
    assert entered == [1, -1]
    assert flashinfer.called == [("bmm_fp8", HANDLE)] * 2


def test_what_does_not_compile_is_explained(flashinfer: Model) -> None:
    flashinfer.broken["gemm"] = RuntimeError("cannot find -lcublasLt")
    with pytest.raises(KernelLoadError, match=r"FlashInfer's products of matrices: .*-lcublasLt"):
        run(a, b, one, one, BRAIN)


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "bias": (
        (a, b, one, one, BRAIN, torch.ones(32)), "a bias torch.float32 (supported: None)",
    ),
    "scale of rows": (
        (a, b, torch.ones(3, 1), one, BRAIN), "scale_a of shape [3, 1] (supported: one scale)",
    ),
    "scale of blocks": (
        (a, eight(256, 64).t(), one, torch.ones(1, 2), BRAIN),
        "scale_b of shape [1, 2] (supported: one scale)",
    ),
    "depth": (
        (eight(3, 24), eight(32, 24).t(), one, one, BRAIN),
        "K 24 and N 32 (supported: multiples of 16)",
    ),
    "no depth": (
        (eight(3, 0), eight(32, 0).t(), one, one, BRAIN),
        "K 0 and N 32 (supported: multiples of 16)",
    ),
    "width": (
        (a, eight(24, 64).t(), one, one, BRAIN), "K 64 and N 24 (supported: multiples of 16)",
    ),
    "sizes": (
        (
            torch.empty(2**31, 64, dtype=E4M3, device="meta"),
            torch.empty(32, 64, dtype=E4M3, device="meta").t(), one, one, BRAIN,
        ),
        f"M {2**31}, N 32 and K 64 (supported: up to {2**31 - 1})",
    ),
    "rows of a": (
        (eight(64, 3).t(), b, one, one, BRAIN),
        "a strides (1, 3) for shape [3, 64] (supported: row-major, contiguous)",
    ),
    "columns of b": (
        (a, eight(64, 32), one, one, BRAIN),
        "b strides (32, 1) for shape [64, 32] (supported: column-major, contiguous)",
    ),
    "pointer of a": (
        (off(a), b, one, one, BRAIN), "a is aligned to 1 bytes (supported: 16)",
    ),
    "pointer of b": (
        (a, off(b.t()).t(), one, one, BRAIN), "b is aligned to 1 bytes (supported: 16)",
    ),
    "codes": (
        (eight(3, 64, dtype=FNUZ), eight(32, 64, dtype=FNUZ).t(), one, one, BRAIN),
        "a dtype torch.float8_e4m3fnuz (supported: torch.float8_e4m3fn)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("args", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses(args: tuple[Any, ...], reason: str) -> None:
    assert examples.refusal(OP, "flashinfer", *args) == reason
    assert examples.refusal(OP, "flashinfer", a, b, one, one, BRAIN) is None


@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_other_results_are_refused(dtype: torch.dtype) -> None:
    assert str(dtype).removeprefix("torch.") in FLOATS
    reason = f"out_dtype {dtype} (supported: torch.bfloat16)"
    assert examples.refusal(OP, "flashinfer", a, b, one, one, dtype) == reason


def test_older_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.without_float8.cache_clear()
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    try:
        reason = examples.refusal(OP, "flashinfer", a, b, one, one, BRAIN)
    finally:
        limits.without_float8.cache_clear()
    assert reason == "float8 on compute capability 8.6 (supported: 8.9 and later)"
