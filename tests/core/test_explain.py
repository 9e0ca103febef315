"""`explain`: the whole decision as data and as a table, without running anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops import (
    AmbiguousBackendError,
    Backend,
    BackendUnavailableError,
    KernelSpec,
    NoBackendError,
    Platform,
    Requirement,
    UnknownBackendError,
)

from .toy import Toy

CPU = Platform.cpu()


@pytest.fixture
def served(toy: Toy) -> Toy:
    toy.serve("sgl_kernel", 6)
    toy.serve("triton", 3)
    toy.serve("inductor", 2, supports=lambda x, n: "n > 8 (supported: up to 8)" if n > 8 else None)
    toy.serve("torch", 1, requires=[Requirement.cuda()])
    return toy


def test_fields(served: Toy) -> None:
    found = torch_ops.explain("toy", torch.ones(2), 3)
    assert (found.op, found.chosen, found.source) == ("toy", Backend.INDUCTOR, "declared")
    assert found.platform == CPU
    assert found.error is None
    seen = [(c.backend.value, c.usable, c.reasons) for c in found.candidates]
    assert seen[:3] == [
        ("torch", False, ("CUDA only (device is 'cpu')",)),
        ("inductor", True, ()),
        ("triton", True, ()),
    ]
    assert seen[3][0] == "sgl_kernel"
    assert "not in the declared order" in seen[3][2][0]
    assert not served.calls


def test_a_better_one_that_is_skipped_is_listed_with_its_reason(served: Toy) -> None:
    found = torch_ops.explain("toy", torch.ones(2), n=9)
    assert found.chosen is Backend.TRITON
    assert found.candidates[1].backend is Backend.INDUCTOR
    assert found.candidates[1].reasons == ("n > 8 (supported: up to 8)",)


def test_table(served: Toy) -> None:
    lines = str(torch_ops.explain("toy", torch.ones(2), 3)).splitlines()
    assert lines[0] == f"toy on {CPU}: inductor (declared)"
    assert lines[1].split() == [
        "torch", "not", "usable", "found", "CUDA", "only", "(device", "is", "'cpu')",
    ]  # fmt: skip
    assert lines[2].split() == ["->", "inductor", "usable", "imported"]
    assert lines[3].split() == ["triton", "usable", "imported"]
    assert lines[5:] == ["compiled graphs: it stays one call: auto: backend 'inductor' (declared)"]


def test_without_arguments_nothing_is_imported(served: Toy) -> None:
    assert {c.state for c in torch_ops.explain("toy", platform=CPU).candidates} == {"found"}


def test_names_and_defaults_of_arguments(served: Toy) -> None:
    assert torch_ops.explain("toy", x=torch.ones(2)).chosen is Backend.INDUCTOR
    assert torch_ops.explain("toy", x=torch.ones(2), n=9).chosen is Backend.TRITON
    with pytest.raises(TypeError, match="unexpected keyword argument 'm'"):
        torch_ops.explain("toy", torch.ones(2), m=1)
    with pytest.raises(TypeError, match="too many positional arguments"):
        torch_ops.explain("toy", torch.ones(2), 1, 2)


def test_what_would_raise_is_told_and_not_raised(served: Toy) -> None:
    found = torch_ops.explain("toy", torch.ones(2), 9, backend="inductor")
    assert (found.chosen, found.source) == (None, "call")
    assert isinstance(found.error, BackendUnavailableError)
    assert "would raise BackendUnavailableError: op 'toy': backend 'inductor'" in str(found)
    with torch_ops.use_backend("torch"):
        found = torch_ops.explain("toy", torch.ones(2))
    assert (found.chosen, found.source) == (None, "scope")
    found = torch_ops.explain("toy", backend="flashinfer")
    assert isinstance(found.error, UnknownBackendError)
    assert found.source == "call"
    found = torch_ops.explain("toy", platform=Platform.rocm("gfx942"))
    assert isinstance(found.error, NoBackendError)
    assert found.source == "declared"


def test_ops_that_are_only_registered() -> None:
    torch_ops.register_kernel(KernelSpec("loose", "triton", "math:sqrt"))
    assert torch_ops.explain("loose", 4.0).chosen is Backend.TRITON
    torch_ops.register_kernel(KernelSpec("loose", "torch", "math:exp"))
    found = torch_ops.explain("loose", 4.0)
    assert found.chosen is None
    assert isinstance(found.error, AmbiguousBackendError)
    assert torch_ops.explain("loose", 4.0, backend="torch").chosen is Backend.TORCH


def test_explain_names_what_then_runs(served: Toy) -> None:
    """For every source and call: the same verdict as the call's own."""
    for backend in (None, "triton", "inductor", "sgl_kernel"):
        for n in (1, 9):
            found = torch_ops.explain("toy", torch.ones(2, 3), n, backend=backend)
            if found.error is not None:
                with pytest.raises(type(found.error)) as raised:
                    served(backend, n)
                assert str(raised.value) == str(found.error)
                continue
            with torch_ops.trace() as seen:
                served(backend, n)
            assert [(r.backend, r.source) for r in seen.records] == [(found.chosen, found.source)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_line_says_which_backend_an_op_uses(dtype: torch.dtype) -> None:
    x: Tensor = torch.randn(4, 64, dtype=dtype)
    first = str(torch_ops.explain("rms_norm", x)).splitlines()[0]
    assert first == f"rms_norm on {Platform.cpu()}: torch (declared)"


@pytest.mark.parametrize(("x", "weight"), [(3, None), (None, None), (torch.ones(2, 4), 3)])
def test_what_is_no_tensor_is_refused(x: Any, weight: Any) -> None:
    name, accepted = ("weight", " or None") if isinstance(x, torch.Tensor) else ("x", "")
    with pytest.raises(
        TypeError, match=rf"op 'rms_norm': argument '{name}' is .*: a torch.Tensor{accepted}\)"
    ):
        torch_ops.explain("rms_norm", x, weight)
