"""Planted faults that fit every op, and pieces that faults of single ops are made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.proof import Mutant

Kernel = Callable[..., Any]


def directed(value: Tensor, dtype: torch.dtype, direction: Callable[[Tensor], Tensor]) -> Tensor:
    """Rounds to a dtype with `torch.trunc`, `torch.floor` or `torch.ceil` instead of to nearest."""
    mantissa, exponent = torch.frexp(value.double())
    digits = 1 - round(torch.log2(torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64)).item())
    kept = torch.ldexp(direction(torch.ldexp(mantissa, torch.tensor(digits))), exponent - digits)
    return torch.where(value.isfinite(), kept, value.double()).to(dtype)


def truncated(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds toward zero, as a cast by bit shift does."""
    return directed(value, dtype, torch.trunc)


def floored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds toward minus infinity."""
    return directed(value, dtype, torch.floor)


def raised(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds toward plus infinity."""
    return directed(value, dtype, torch.ceil)


def each(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies a change to the first output."""
    if isinstance(result, Tensor):
        return change(result)
    first, *rest = result
    return (change(first), *rest)


def on_result(kernel: Kernel, change: Callable[[Tensor], Tensor]) -> Kernel:
    """The kernel with its first output changed."""
    return lambda *args: each(kernel(*args), change)


def on_tensors(kernel: Kernel, change: Callable[[Tensor], Tensor]) -> Kernel:
    """The kernel with every tensor argument changed before it sees it."""
    return lambda *args: kernel(*(change(a) if isinstance(a, Tensor) else a for a in args))


def _as_if_contiguous(value: Tensor, offset: int) -> Tensor:
    """What a kernel sees that walks the memory behind the pointer without asking for strides."""
    flat = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    steps = (torch.arange(value.numel()) + offset).remainder(max(flat.numel(), 1))
    return flat[steps].view(value.shape)


def _ignores_strides(value: Tensor) -> Tensor:
    return _as_if_contiguous(value, int(value.storage_offset()))


def _ignores_offset(value: Tensor) -> Tensor:
    if not value.is_contiguous():
        return value
    return _as_if_contiguous(value, 0)


def _ignores_last_stride(value: Tensor) -> Tensor:
    if value.dim() < 2 or value.stride(-1) == 1 or value.numel() == 0:
        return value
    return value.transpose(-1, -2).reshape(value.shape)


def _unwritten_tail(value: Tensor) -> Tensor:
    out = torch.empty_like(value)
    if out.dim():
        out.view(torch.uint8).fill_(0x5A)  # what memory held before may be the right result
    keep = max(value.shape[0] - 1, 0) if value.dim() else 0
    out[:keep] = value[:keep]
    return out


def _one_buffer(kernel: Kernel) -> Kernel:
    buffers: dict[tuple[Any, ...], Tensor] = {}

    def change(value: Tensor) -> Tensor:
        key = (value.dtype, tuple(value.shape))
        return buffers.setdefault(key, torch.empty_like(value)).copy_(value)

    return on_result(kernel, change)


def _writes_input(kernel: Kernel) -> Kernel:
    def call(*args: Any) -> Any:
        result = kernel(*args)
        if args[0].numel():
            args[0][(0,) * args[0].dim()] = 7
        return result

    return call


def _returns_input(kernel: Kernel) -> Kernel:
    def call(*args: Any) -> Any:
        result = kernel(*args)
        first = result if isinstance(result, Tensor) else result[0]
        if not args[0].is_contiguous() or args[0].numel() < first.numel():
            return result
        return each(result, args[0].view(-1)[: first.numel()].view(first.shape).copy_)

    return call


def _alternates(kernel: Kernel) -> Kernel:
    calls = itertools.count()

    def change(value: Tensor) -> Tensor:
        return last_bits(value) if next(calls) % 2 else value

    return on_result(kernel, change)


def _then(kernel: Kernel, change: Callable[[], object]) -> Kernel:
    """The kernel, which leaves PyTorch in another state."""

    def call(*args: Any) -> Any:
        result = kernel(*args)
        change()
        return result

    return call


def _raises_for_empty(kernel: Kernel) -> Kernel:
    def call(*args: Any) -> Any:
        if any(isinstance(a, Tensor) and a.numel() == 0 for a in args):
            msg = "invalid launch configuration"
            raise RuntimeError(msg)
        return kernel(*args)

    return call


def _strided(value: Tensor) -> Tensor:
    if value.dim() < 1:
        return value
    return value.repeat_interleave(2, dim=-1)[..., ::2]


def _value_mutants(kernel: Kernel) -> tuple[Mutant, ...]:
    """Faults of addressing and determinism."""
    return (
        Mutant("ignores_strides", ("layout",), on_tensors(kernel, _ignores_strides)),
        Mutant("ignores_offset", ("layout",), on_tensors(kernel, _ignores_offset)),
        Mutant("ignores_last_stride", ("layout",), on_tensors(kernel, _ignores_last_stride)),
        Mutant("unwritten_tail", ("bound",), on_result(kernel, _unwritten_tail)),
        Mutant("alternating_result", ("rerun",), _alternates(kernel)),
        Mutant("drifting_result", ("rerun",), _drifts(kernel)),
        Mutant("random_rounding", ("rerun",), _random_rounding(kernel)),
        Mutant("reseeds", ("contract",), _then(kernel, lambda: torch.manual_seed(1))),
        Mutant("grad_mode_flipped", ("contract",),
               _then(kernel, lambda: torch._C._set_grad_enabled(not torch.is_grad_enabled()))),
        Mutant("one_thread_more", ("contract",),
               _then(kernel, lambda: torch.set_num_threads(torch.get_num_threads() + 1))),
    )  # fmt: skip


def mutating_mutants(kernel: Kernel, places: Sequence[int]) -> tuple[Mutant, ...]:
    """Generic faults of an op that writes the arguments at these places."""
    other = next(i for i in range(len(places) + 1) if i not in places)

    def write(*args: Any) -> Any:
        result = kernel(*args)
        outputs = (result,) if isinstance(result, Tensor) else result
        for place, output in zip(places, outputs, strict=True):
            args[place].copy_(output)
        return outputs

    def also(change: Callable[..., Any]) -> Kernel:
        def call(*args: Any) -> Any:
            write(*args)
            return change(*args)

        return call

    def writes_other(*args: Any) -> None:
        if args[other].numel():
            args[other][(0,) * args[other].dim()] = 7

    def requires_grad(*args: Any) -> None:
        args[places[0]].requires_grad_()

    def writes_gap(*args: Any) -> None:
        _fill_gaps(args[places[0]])

    def writes_gap_if_empty(*args: Any) -> None:
        if not args[places[0]].numel():
            _fill_gaps(args[places[0]])

    def raises_if_empty(*args: Any) -> None:
        if not args[places[0]].numel():
            msg = "invalid launch configuration"
            raise RuntimeError(msg)

    return (
        *_value_mutants(kernel),
        Mutant("writes_input", ("contract",), also(writes_other), in_place=True),
        Mutant("argument_requires_grad", ("contract",),
               also(requires_grad), in_place=True),
        Mutant("writes_gap", ("contract",), also(writes_gap), in_place=True),
        Mutant("returns_result", ("contract",), write, in_place=True),
        Mutant("raises_for_empty", ("zero",), also(raises_if_empty), in_place=True),
        Mutant("writes_gap_for_empty", ("zero",), also(writes_gap_if_empty), in_place=True),
        Mutant("returns_for_empty", ("zero",),
               also(lambda *args: None if args[places[0]].numel() else args[places[0]]),
               in_place=True),
    )  # fmt: skip


def _fill_gaps(value: Tensor) -> None:
    """Zeroes the memory behind a tensor, except for its elements."""
    keep = value.clone()
    torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).zero_()
    value.copy_(keep)


def generic_mutants(kernel: Kernel) -> tuple[Mutant, ...]:
    """Faults of memory, metadata and determinism, planted into a correct functional kernel."""
    other = {torch.float32: torch.float64}
    return (
        *_value_mutants(kernel),
        Mutant("one_output_buffer", ("contract",), _one_buffer(kernel)),
        Mutant("writes_input", ("contract",), _writes_input(kernel)),
        Mutant("returns_input", ("contract",), _returns_input(kernel)),
        Mutant("strided_output", ("contract",), on_result(kernel, _strided)),
        Mutant("output_requires_grad", ("contract",),
               on_result(kernel, lambda t: t.detach().requires_grad_())),
        Mutant("extra_axis", ("contract",), on_result(kernel, lambda t: t.unsqueeze(0))),
        Mutant("wrong_dtype", ("contract",),
               on_result(kernel, lambda t: t.to(other.get(t.dtype, torch.float32)))),
        Mutant("raises_for_empty", ("zero",), _raises_for_empty(kernel)),
        Mutant("one_row_for_empty", ("zero",), on_result(kernel, _one_row)),
        Mutant("flat_for_empty", ("zero",),
               on_result(kernel, lambda t: t if t.numel() else t.new_empty(0))),
    )  # fmt: skip


def last_bits(value: Tensor) -> Tensor:
    """Moves every element by two units in the last place, integers by two."""
    if value.dtype.itemsize == 1:
        return _other_codes(value, 2)
    if not value.dtype.is_floating_point:
        return value + 2
    return value * (1 + 2 * torch.finfo(value.dtype).eps)


def _other_codes(value: Tensor, count: int) -> Tensor:
    """Adds a number to the bits of float8 or int8: codes are in order of magnitude."""
    return (value.view(torch.int8) + count).view(value.dtype)


def _one_row(value: Tensor) -> Tensor:
    return value if value.numel() else value.new_zeros([max(n, 1) for n in value.shape])


def _drifts(kernel: Kernel) -> Kernel:
    """Adds a running state to the result, as a kernel does that never clears its scratch."""
    calls = itertools.count()

    def change(value: Tensor) -> Tensor:
        count = 2 * next(calls)
        if value.dtype.itemsize == 1:
            return _other_codes(value, count)
        if not value.dtype.is_floating_point:
            return value + count // 2
        return value + value.abs() * torch.finfo(value.dtype).eps * count

    return on_result(kernel, change)


def _random_rounding(kernel: Kernel) -> Kernel:
    def change(value: Tensor) -> Tensor:
        up = torch.rand(value.shape) < 0.5
        return torch.where(up, last_bits(value), value)

    return on_result(kernel, change)
