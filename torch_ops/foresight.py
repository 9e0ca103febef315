"""What a call of a compiled graph will run, without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from torch_ops import binding, dynamo, inlining, policy, selector, tracing, tuning
from torch_ops.backend import Backend
from torch_ops.declare import INLINED
from torch_ops.graphs import BACKEND, call_of
from torch_ops.platform import Platform, platform_of

__all__ = ["Planned", "foresee", "is_call", "planned", "symbols", "told_by"]

_UNKNOWN = object()
Foresees = Callable[..., tracing.Way]
_told_by: dict[str, tuple[str, Foresees]] = {}


class Planned(NamedTuple):
    """A call that a graph holds.

    Attributes:
        op: Its op, ``"attention"`` for layers.
        values: Its arguments by position; `_Layout` in the places of tensors, and formulas.
        backend: The backend that it names, if it does.
        dissolved: Whether the reference stands in its place.
        foresees: Tells how it goes, where that isn't the op's own policy.
    """

    op: str
    values: tuple[Any, ...]
    backend: str | None
    dissolved: bool
    foresees: Foresees | None


class _Layout(NamedTuple):
    """A tensor of a graph; sizes, strides and offset may be formulas over the graph's symbols."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device


def told_by(operator: str, op: str, foresees: Foresees) -> None:
    """Have an operator that is no declared op's counted as an op.

    Args:
        operator: Its name, with the namespace.
        op: The name that traces give it.
        foresees: Takes its arguments, with fake tensors, and tells how the call goes.
    """
    _told_by[operator] = op, foresees


def is_call(node: Node) -> bool:
    """Whether a node of a graph of Dynamo's, after ours have changed it, calls an op."""
    name = _operator(node)
    return name in _told_by or name.startswith(f"{INLINED}::") or call_of(node) is not None


def planned(node: Node) -> Planned:
    """Note what such a call is, without the graph."""
    name = _operator(node)
    if name in _told_by:
        op, foresees = _told_by[name]
        return Planned(op, _noted(node.args), None, False, foresees)
    if name.startswith(f"{INLINED}::"):
        op, backend = name.partition("::")[2], node.meta.get(BACKEND)
        return Planned(op, _noted(node.args), backend, True, None)
    call = call_of(node)
    assert call is not None
    return Planned(call.declaration.name, _noted(call.values), call.backend, False, None)


def symbols(inputs: Sequence[Any]) -> dict[Any, int]:
    """Give the place of each symbol among a graph's inputs."""
    return {
        value: index
        for index, value in enumerate(inputs)
        if not isinstance(value, Tensor) and getattr(value, "is_Symbol", False)
    }


def foresee(call: Planned, sizes: Mapping[Any, int]) -> tracing.Way:
    """Tell how a call goes under the policy of now.

    Args:
        call: The call.
        sizes: What the graph's symbols are.

    Raises:
        Exception: it can't be told, as what a kernel's predicate may raise.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        args = [_made(value, sizes) for value in call.values]
        if call.foresees is not None:
            return call.foresees(*args)
        platform = platform_of(args) or Platform.cpu()
        row = tuning.row_of(call.op, platform, args) if call.backend is None else None
        scope = policy.current_scope()
        plan = selector.make_plan(call.op, platform, backend=call.backend, scope=scope, row=row)
        if not call.dissolved:
            return binding.foresee(plan, args)
        skipped = [(c.backend, "; ".join(c.reasons)) for c in plan.skipped]
        first = plan.specs[0].backend
        if first is not Backend.TORCH:
            reason = inlining.decide(call.op, args, call.backend, platform).reason
            skipped.append((first, f"inlined: {reason}"))
        return tracing.way_of(call.op, Backend.TORCH, plan.source, skipped)


def _operator(node: Node) -> str:
    target = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def _noted(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        _template(v.meta.get("example_value", _UNKNOWN) if isinstance(v, Node) else v)
        for v in values
    )


def _template(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return dynamo.expression(value)
    sizes, strides = (tuple(map(dynamo.expression, part)) for part in (value.shape, value.stride()))
    offset = dynamo.expression(value.storage_offset())
    return _Layout(sizes, strides, offset, value.dtype, value.device)


def _made(value: Any, sizes: Mapping[Any, int]) -> Any:
    if value is _UNKNOWN:
        raise LookupError("an argument of the call isn't known")
    if not isinstance(value, _Layout):
        return dynamo.evaluate(value, sizes)
    shape, strides = (
        [dynamo.evaluate(number, sizes) for number in part] for part in (value.sizes, value.strides)
    )
    tensor = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    # What kernels ask of an address is its alignment, and allocations are aligned.
    address = dynamo.evaluate(value.offset, sizes) * tensor.element_size()
    tensor.data_ptr = lambda: address  # type: ignore[method-assign]
    return tensor
