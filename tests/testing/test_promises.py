"""A kernel that promises determinism or batch invariance is held to it; one that doesn't is not."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from tests.core import plugins
from torch_ops import BackendUnavailableError
from torch_ops.declarations import catalogue
from torch_ops.testing import proof_of
from torch_ops.testing.batch_faults import row_by_row
from torch_ops.testing.proof import proof_names
from torch_ops.testing.registered import registered
from torch_ops.testing.result import Cell
from torch_ops.testing.subject import subject_of
from torch_ops.testing.verify import verify

OP = "rms_norm"
reference = catalogue()[OP].reference


def promising(kernel: Callable[..., Any], **promises: object) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return kernel(*args)

    vars(call).update(promises)
    return call


def cell(kernel: Any, op: str = OP, **options: Any) -> Cell:
    (found,) = verify(op, kernel, dtypes=["float32"], profile="dev", **options).cells
    return found


def by_count(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Sums a row at once, or in two parts where there are several rows: right in either order."""
    wide = x.contiguous().float()
    square = wide.square()
    parts = [square[..., ::2], square[..., 1::2]] if x.dim() > 1 and x.shape[0] > 1 else [square]
    total = torch.stack([part.sum(-1) for part in parts]).sum(0)
    out = wide * torch.rsqrt(total.unsqueeze(-1) / x.shape[-1] + eps)
    return (out if weight is None else out * weight.contiguous().float()).to(x.dtype)


def unsteady() -> Callable[..., Tensor]:
    """The last bit is another at every second call."""
    calls = itertools.count()

    def kernel(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        out: Tensor = reference(x, weight, eps)
        return torch.nextafter(out, torch.zeros_like(out)) if next(calls) % 2 else out

    return kernel


def test_a_promise_of_batch_invariance_is_checked_where_it_is_made() -> None:
    steady = cell(promising(row_by_row(reference, (0,)), batch_invariant=True))
    assert steady.verdict == "passed", steady.reason
    assert steady.laws["batch_invariance"] > 10
    silent = cell(by_count)
    assert silent.verdict == "passed", silent.reason
    assert "batch_invariance" not in silent.laws
    broken = cell(promising(by_count, batch_invariant=True))
    assert broken.verdict == "failed"
    assert {f.layer for f in broken.failures} == {"batch_invariance"}
    assert "row 0 alone differs bitwise" in broken.reason


def test_a_predicate_that_counts_breaks_the_promise() -> None:
    def supports(x: Tensor, *_: object) -> str | None:
        return "one row" if x.dim() > 1 and x.shape[0] == 1 else None

    kernel = promising(row_by_row(reference, (0,)), batch_invariant=True, supports=supports)
    assert "of these rows, and refuses 1: one row" in cell(kernel).reason
    kernel = promising(row_by_row(reference, (0,)), supports=supports)
    assert cell(kernel).verdict == "passed"


def test_a_promise_of_determinism_is_checked_unless_it_is_withdrawn() -> None:
    broken = cell(unsteady())
    assert broken.verdict == "failed"
    assert {f.layer for f in broken.failures} >= {"rerun"}
    withdrawn = cell(promising(unsteady(), deterministic=False))
    assert "rerun" not in withdrawn.laws
    assert not {f.layer for f in withdrawn.failures} & {"rerun"}


def test_inference_mode_is_no_reason_for_other_bits() -> None:
    def kernel(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        out: Tensor = reference(x, weight, eps)
        return out * 2 if torch.is_inference_mode_enabled() else out

    assert {f.layer for f in cell(kernel).failures} == {"rerun"}


def test_a_promise_is_true_or_false() -> None:
    with pytest.raises(TypeError, match=r"call\.batch_invariant: received 'yes', accepted a bool"):
        subject_of(promising(reference, batch_invariant="yes"))


def test_a_promise_that_no_law_is_about_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proof_of(OP)
    laws = tuple(law for law in proof.laws if law.declared != "batch_invariant")
    monkeypatch.setattr(
        "torch_ops.testing.verify.proof_of", lambda op: dataclasses.replace(proof, laws=laws)
    )
    found = cell(promising(row_by_row(reference, (0,)), batch_invariant=True))
    assert found.verdict == "too few"
    assert found.reason == "promised, and no law is about it: batch_invariant"


# Ops of which no row has a result of its own: one scale for all, one list of all, sums over all.
# And experts, and gradients of attention, whose reference multiplies other numbers of rows by other
# instructions: a kernel that promises there what no law is about is red.
TOGETHER = (
    "attention_backward", "fused_experts", "layer_norm_backward", "moe_align_block_size",
    "quantize_fp8_per_tensor", "rms_norm_backward",
)  # fmt: skip


@pytest.mark.parametrize("op", proof_names())
def test_every_proof_has_a_law_about_each_promise(op: str) -> None:
    subject = subject_of(promising(lambda: None, batch_invariant=True))
    contract = subject.under(catalogue()[op].contract)
    assert contract == dataclasses.replace(catalogue()[op].contract, batch_invariant=True)
    found = {law.declared for law in proof_of(op).laws if law.binds(contract)}
    assert ("batch_invariant" in found) is (op not in TOGETHER)


@pytest.fixture
def steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A foreign backend that promises for one op and withdraws for another."""
    plugins.install("steady", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch_ops.refresh()
    yield
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.startswith("torch_ops_steady")]:
        del sys.modules[name]
    torch_ops.refresh()


@pytest.mark.parametrize("isolate", [False, True])
def test_a_registered_backend_is_held_to_what_its_package_says(
    isolate: bool, steady: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    found = cell("steady", isolate=isolate)
    assert found.verdict == "passed", found.reason
    assert found.laws["batch_invariance"] > 10
    withdrawn = cell("steady", "silu_and_mul", isolate=isolate)
    assert "rerun" not in withdrawn.laws
    assert "compiled" not in {f.layer for f in withdrawn.failures}


def test_a_registered_kernel_that_breaks_its_word_is_red(
    steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["torch_ops_steady"], "deterministic", True)
    torch_ops.refresh()
    assert registered("silu_and_mul", "steady").promises["deterministic"]
    found = cell("steady", "silu_and_mul")
    assert found.verdict == "failed"
    assert "rerun" in {f.layer for f in found.failures}


def test_what_a_policy_refuses_is_refused_to_the_kit(steady: None) -> None:
    args = [torch.ones(2, 4)]
    subject = registered("silu_and_mul", "steady")
    assert subject.refuses(args) is None
    with torch_ops.use_backend(deterministic=True):
        assert "not deterministic, which use_backend requires" in str(subject.refuses(args))
        with pytest.raises(BackendUnavailableError, match="not deterministic"):
            subject.call(*args)
