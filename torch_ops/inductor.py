"""All use of private parts of Inductor: which operator its code calls, and what it rounds.

Tested on every supported torch. Imports no part of ``torch._inductor`` by itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["lower_rounding", "substitute"]

_log = logging.getLogger(__name__)
_met: set[torch._ops.OpOverload[..., Any]] = set()
_DEVICES = ("cpu", "cuda")


def substitute(
    written: torch._ops.OpOverload[..., Any], called: torch._ops.OpOverload[..., Any]
) -> None:
    """Make Inductor's code call another operator in place of the one that a program names.

    Does nothing before Inductor is loaded. Where this PyTorch lacks a part of it that is needed,
    the code calls what the program names.

    Args:
        written: The operator in the program.
        called: One of the same schema, for CPU and CUDA tensors.
    """
    if "torch._inductor.lowering" not in sys.modules or written in _met:
        return
    _met.add(written)
    try:
        _register(written, called)
    except (ImportError, AttributeError, TypeError) as error:
        _log.info("compiled graphs call %s itself: %s: %s", written, type(error).__name__, error)


def _register(
    written: torch._ops.OpOverload[..., Any], called: torch._ops.OpOverload[..., Any]
) -> None:
    """Register the fallback that Inductor makes of any operator, and over it the other's.

    A package of AOTInductor is loaded where there are no guards, and calls what is written.
    """
    from torch._inductor import lowering
    from torch._inductor.virtualized import V
    from torch._library.utils import get_layout_constraint_tag

    constraint = lowering.tag_to_layout_constraint(
        get_layout_constraint_tag(written, with_default=True)
    )
    usual, other = lowering.fallback_handler(written), lowering.fallback_handler(called)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        args = _positional(called, args, kwargs)
        return (usual if V.graph.aot_mode or not _on_devices(args) else other)(*args)

    lowering.make_fallback(written, layout_constraint=constraint, warn=False)
    register: Callable[..., Any] = lowering.register_lowering(written, type_promotion_kind=None)
    register(lowered)


def lower_rounding(operator: torch._ops.OpOverload[..., Any]) -> None:
    """Make Inductor's code round to the dtype of a tensor where this operator stands.

    Does nothing before Inductor is loaded. Where this PyTorch lacks a part of it that is needed,
    the code calls the operator, which copies.
    """
    if "torch._inductor.lowering" not in sys.modules or operator in _met:
        return
    _met.add(operator)
    try:
        _register_rounding(operator)
    except (ImportError, AttributeError, TypeError) as error:
        _log.info("compiled graphs call %s itself: %s: %s", operator, type(error).__name__, error)


def _register_rounding(operator: torch._ops.OpOverload[..., Any]) -> None:
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import ops

    def lowered(x: Any) -> Any:
        dtype, load = x.get_dtype(), x.make_loader()

        def element(index: Any) -> Any:
            # A conversion to the dtype and back would be left out.
            bits = ops.to_dtype_bitcast(load(index), torch.int16, dtype)
            return ops.to_dtype_bitcast(bits, dtype, torch.int16)

        return ir.Pointwise.create(
            device=x.get_device(), dtype=dtype, inner_fn=element, ranges=list(x.get_size())
        )

    register: Callable[..., Any] = lowering.register_lowering(operator, type_promotion_kind=None)
    register(lowered)


def _positional(
    operator: torch._ops.OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Give all arguments by position; Inductor names those at the end, which costs a call more."""
    values = dict(zip((a.name for a in operator._schema.arguments), args, strict=False)) | kwargs
    return tuple(
        values.get(argument.name, argument.default_value) for argument in operator._schema.arguments
    )


def _on_devices(args: tuple[Any, ...]) -> bool:
    devices = [value.get_device() for value in args if hasattr(value, "get_device")]
    return all(device is not None and device.type in _DEVICES for device in devices)
