"""What every kernel promises beyond its numbers: layouts, fresh outputs, versions, modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_utils import CrossRefFakeMode

from torch_ops import ops
from torch_ops.declarations import catalogue

from . import samples
from .samples import BACKENDS, CELLS, LAYOUTS, OPS, Arguments

FUNCTIONAL = [op for op in OPS if not catalogue()[op].mutates]
MUTATING = [op for op in OPS if catalogue()[op].mutates]


def run(op: str, args: Arguments, backend: str | None = None) -> list[Tensor]:
    return samples.outputs(op, args, getattr(ops, op)(**args, backend=backend))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits, NaN too."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = (t.clone(memory_format=torch.contiguous_format) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# Inductor compiles each layout and mode anew: of some ops here, of the others where all is tried.
COMPILED = ("fused_add_rms_norm", "rms_norm", "silu_and_mul")


def _anew(op: str, backend: str) -> bool:
    return backend == "inductor" and op not in COMPILED


def _cell(op: str, backend: str, layout: str) -> object:
    marks = [pytest.mark.exhaustive] if _anew(op, backend) else []
    return pytest.param(op, backend, layout, marks=marks)


@pytest.mark.parametrize(
    ("op", "backend", "layout"),
    [_cell(*cell, name) for cell in CELLS for name in LAYOUTS if name != "contiguous"],
)
def test_a_strided_input_gives_the_bits_of_its_contiguous_copy(
    op: str, backend: str, layout: str
) -> None:
    args = samples.arguments(op)
    expected = run(op, samples.lay_out(args, "contiguous"), backend)
    found = run(op, samples.lay_out(args, layout), backend)
    assert [same(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize(
    ("op", "backend", "layout"),
    [_cell(*cell, name) for cell in CELLS if cell[0] in FUNCTIONAL for name in LAYOUTS],
)
def test_outputs_are_fresh_and_inputs_stay(op: str, backend: str, layout: str) -> None:
    args = samples.lay_out(samples.arguments(op), layout)
    tensors = [value for value in args.values() if isinstance(value, Tensor)]
    before = [(t.clone(), t._version) for t in tensors]
    found = run(op, args, backend)
    stores = [t.untyped_storage().data_ptr() for t in (*tensors, *found)]
    for output in found:
        assert output.is_contiguous()
        assert output.storage_offset() == 0
        assert stores.count(output.untyped_storage().data_ptr()) == 1
    for tensor, (copy, version) in zip(tensors, before, strict=True):
        assert same(tensor, copy)
        assert tensor._version == version


@pytest.mark.parametrize("overload", ["default", "backend"])
@pytest.mark.parametrize(("op", "backend"), [cell for cell in CELLS if cell[0] in MUTATING])
def test_versions_count_what_is_written(op: str, backend: str, overload: str) -> None:
    args = samples.arguments(op)
    tensors = {name: value for name, value in args.items() if isinstance(value, Tensor)}
    before = {name: value._version for name, value in tensors.items()}
    packet = getattr(torch.ops.torch_ops, op)
    if overload == "backend":
        packet.backend(*args.values(), backend)
    else:
        packet(*args.values())
    written = {name for name, value in tensors.items() if value._version > before[name]}
    assert written == set(catalogue()[op].mutates)


@pytest.mark.parametrize("op", MUTATING)
def test_autograd_notices_that_a_saved_tensor_was_written(op: str) -> None:
    args = samples.arguments(op)
    name = catalogue()[op].mutates[0]
    scale = torch.ones(args[name].shape[-1], requires_grad=True)
    product = (scale * args[name]).sum()
    with torch.no_grad():
        getattr(ops, op)(**args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("op", [op for op in MUTATING if op.removesuffix("_") in OPS])
def test_mutating_ops_write_what_the_functional_ones_return(op: str) -> None:
    args = samples.arguments(op)
    expected = run(op.removesuffix("_"), samples.lay_out(args, "contiguous"))
    expected = expected[: len(catalogue()[op].mutates)]
    for layout in LAYOUTS:
        found = run(op, samples.lay_out(args, layout))
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        pytest.param(op, dtype, marks=samples.alike(op))
        for op in OPS
        for dtype in catalogue()[op].dtypes
    ],
)
def test_fake_and_kernel_agree_on_every_dtype_and_size(op: str, dtype: torch.dtype) -> None:
    """Shapes, strides, dtypes and devices, by PyTorch's comparison of each call with its fake."""
    for rows in (0, 1, 3):
        args = samples.arguments(op, rows, dtype)
        for layout in LAYOUTS:
            with CrossRefFakeMode(check_strides=True, check_aliasing=True):
                getattr(ops, op)(**samples.lay_out(args, layout), backend="torch")


@pytest.mark.parametrize(
    ("op", "backend"),
    [pytest.param(*cell, marks=[pytest.mark.exhaustive] if _anew(*cell) else []) for cell in CELLS],
)
def test_every_mode_gives_the_same_bits(op: str, backend: str) -> None:
    """Grad mode, no_grad, inference mode with plain and with inference tensors, and autocast."""
    args = samples.arguments(op)
    expected = run(op, samples.lay_out(args, "contiguous"), backend)

    def check(made: Arguments) -> None:
        found = run(op, made, backend)
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))
        assert not any(output.requires_grad for output in found)

    with torch.no_grad():
        check(samples.lay_out(args, "contiguous"))
    plain = samples.lay_out(args, "contiguous")
    with torch.inference_mode():
        check(plain)
        inference = samples.lay_out(args, "contiguous")
        kept = samples.lay_out(args, "contiguous")
        check(inference)
    if catalogue()[op].mutates:
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside Infer"):
            run(op, kept, backend)
    else:
        check(kept)
    with torch.autocast("cpu", torch.bfloat16):
        check(samples.lay_out(args, "contiguous"))


@pytest.mark.parametrize("op", OPS)
def test_optional_tensors_may_be_left_out(op: str) -> None:
    """By position, by name, as None, and by leaving them to their defaults: the same bits."""
    parameters = catalogue()[op].signature.parameters.values()
    args = samples.arguments(op)
    required = {p.name: args[p.name] for p in parameters if p.default is p.empty}
    full = required | {p.name: p.default for p in parameters if p.default is not p.empty}
    packet: Any = getattr(torch.ops.torch_ops, op)

    calls: list[tuple[Arguments, Callable[[Arguments], Any]]] = [
        (required, lambda a: packet(*a.values())),
        (full, lambda a: packet(*a.values())),
        (full, lambda a: packet(**a)),
        (full, lambda a: packet.backend(*a.values(), "torch")),
        (required, lambda a: getattr(ops, op)(**a)),
        (full, lambda a: getattr(ops, op)(*a.values(), backend="torch")),
    ]
    first, *rest = (
        samples.outputs(op, made := samples.lay_out(values, "contiguous"), call(made))
        for values, call in calls
    )
    for found in rest:
        assert all(same(a, b) for a, b in zip(found, first, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("rms_norm", {"x": torch.randn(3, 0), "weight": torch.randn(0)}),
        ("layer_norm", {"x": torch.randn(3, 0), "weight": torch.randn(0), "bias": None}),
        ("silu_and_mul", {"x": torch.randn(3, 0)}),
        ("apply_rope", {"q": torch.randn(3, 0, 16), "k": torch.randn(3, 0, 16)}),
        ("apply_rope", {"cos_sin_cache": torch.randn(32, 0)}),
    ],
    ids=["rms_norm", "layer_norm", "silu_and_mul", "no heads", "nothing turns"],
)
def test_empty_in_another_dimension(op: str, change: Arguments, backend: str) -> None:
    args = samples.arguments(op) | change
    call = getattr(torch.ops.torch_ops, op).backend
    torch.library.opcheck(call, (*args.values(), backend))
