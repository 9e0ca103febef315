"""Rows of catalogues about norms in graphs that Inductor compiles, fused or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_ops import ops
from torch_ops.testing.registered import registered

from .kernels import FP32, backends_of, judge, of_backend, require

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
PLACES = [
    *(pytest.param(backend, "cpu", id=f"{backend}-cpu") for backend in ("torch", "inductor")),
    *(
        pytest.param(backend, "cuda", id=f"{backend}-gpu", marks=[pytest.mark.gpu, needs_gpu])
        for backend in backends_of("layer_norm")
    ),
]


def _one_over(y: Tensor) -> Tensor:
    """Well-conditioned: of 1 / (|y| + 1e-6), a small error of y would be a large one."""
    return 1 / (y.abs() + 1)


def _check(args: tuple[Any, ...], y: Tensor, inverse: Tensor) -> None:
    """The norm within its bound, and the rest exact for that norm.

    The sum, the quotient and a quotient that GPUs approximate err by 2 units in the last place.
    """
    judge("layer_norm", args, [y])
    exact = _one_over(y.double())
    error = ((inverse.double() - exact) / exact).abs().max()
    require(f"N33: relative error {error}", error <= 4 * torch.finfo(inverse.dtype).eps)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "place"), PLACES)
def test_row_n33_a_norm_and_a_reciprocal_in_one_graph(
    backend: str, place: str, fresh_dynamo: None
) -> None:
    kernels = of_backend(backend, torch.device(place))
    x, weight, bias = kernels.normal(64, 128), kernels.normal(128, seed=1), kernels.normal(128)
    args: tuple[Any, ...] = (x, weight, bias)
    if registered("layer_norm", backend).refuses((*args, 1e-5)) is not None:
        args = (x.bfloat16(), weight, bias)
    reason = registered("layer_norm", backend).refuses((*args, 1e-5))
    if reason is not None:
        pytest.skip(f"refused: {reason}")

    @torch.compile(fullgraph=True)
    def both(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y = ops.layer_norm(x, weight, bias, backend=backend)
        return y, _one_over(y)

    _check(args, *both(*args))


def test_row_n33_finds_an_unwritten_part() -> None:
    x = torch.randn(64, 128)
    y = ops.layer_norm(x, backend="torch")
    inverse = _one_over(y)
    _check((x,), y, inverse)
    inverse[32:] = 0
    with pytest.raises(AssertionError, match="N33"):
        _check((x,), y, inverse)
    with pytest.raises(AssertionError, match="bound"):
        _check((x,), y * (1 + 1e-4), inverse)
    assert y.dtype == FP32
