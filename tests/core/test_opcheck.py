"""PyTorch's own check of every operator, backend by backend, on every layout of its inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing._internal.optests.generate_tests import OpCheckError

from . import samples
from .samples import CELLS, OPS
from .toy import Toy

# "right already": contiguous and of the accumulation dtype, so that nothing is copied on the way.
LAYOUTS = {"right already": "contiguous"} | {name: name for name in samples.LAYOUTS}
LAYOUTS.pop("contiguous")


# What takes Inductor longest, where all is tried; and so do layouts, of which it gets copies.
LONG = ("apply_rope", "attention", "attention_with_lse", "merge_state", "min_p_filter")
COMPILED = ("fused_add_rms_norm", "silu_and_mul")


def _cell(op: str, backend: str, layout: str) -> object:
    plain = layout == "right already" or op in COMPILED
    long = backend == "inductor" and (op in LONG or not plain)
    marks = [pytest.mark.exhaustive] if long else samples.alike(op)
    return pytest.param(op, backend, layout, marks=marks)


@pytest.mark.parametrize(
    ("op", "backend", "layout"),
    [_cell(*cell, layout) for cell in CELLS for layout in (*LAYOUTS, "zero-size")],
)
def test_opcheck(op: str, backend: str, layout: str) -> None:
    """Schema, autograd registration, fake against real, and AOTAutograd with dynamic shapes."""
    args = samples.arguments(op, rows=0 if layout == "zero-size" else 3)
    args = samples.lay_out(args, LAYOUTS.get(layout, "contiguous"))
    overload = getattr(torch.ops.torch_ops, op).backend
    values = (*args.values(), backend)
    torch.library.opcheck(overload, values, test_utils=samples.opchecks(args))


@pytest.mark.parametrize("op", OPS)
def test_opcheck_of_the_default_overload(op: str) -> None:
    args = samples.arguments(op)
    overload = getattr(torch.ops.torch_ops, op).default
    torch.library.opcheck(overload, tuple(args.values()), test_utils=samples.opchecks(args))


@pytest.mark.parametrize(
    "kernel",
    [
        lambda x, n: x,
        lambda x, n: x.view(x.shape),
        lambda x, n: x.contiguous(),
        lambda x, n: torch.ones(3, 2).t(),
        lambda x, n: torch.ones(2, 3, dtype=torch.float64),
        lambda x, n: torch.ones(3, 2),
        lambda x, n: x.add_(1).clone(),
    ],
    ids=["itself", "view", "contiguous", "strides", "dtype", "shape", "writes its input"],
)
def test_opcheck_finds_what_it_is_for(kernel: Callable[[Tensor, int], Tensor], toy: Toy) -> None:
    toy.serve("torch", 1, kernel=kernel)
    with pytest.raises(OpCheckError):
        torch.library.opcheck(torch.ops.torch_ops.toy.default, (torch.ones(2, 3), 1))
