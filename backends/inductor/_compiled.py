"""Compiles an op's reference once per class of calls, on rows flattened to two dimensions."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as symbolic

from torch_ops import locks, once, policy
from torch_ops.declare import Declaration
from torch_ops.errors import BackendUnavailableError, CaptureError
from torch_ops.platform import CONVERTS_FLOAT8, Platform, rejection

__all__ = ["compiled", "no_compiler", "with_own_code"]

_COMPILERS = ("g++", "clang++")
_lock = locks.lock()
_Key = tuple[Any, ...]
_functions: dict[_Key, Callable[..., Any]] = {}
_exhausted: dict[_Key, str] = {}
_narrow: dict[_Key, set[_Key]] = {}
LARGE = 1 << 20  # bytes of the first tensor on a CPU from which a call is compiled for its widths
WIDTHS = 8  # of a class; further ones share one graph
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def compiled(
    declaration: Declaration, row_arguments: tuple[str, ...] = (), *, float8: bool = False
) -> tuple[Callable[..., Any], Callable[..., str | None]]:
    """Give an op's kernel and its predicate.

    Args:
        declaration: The op; one that mutates is compiled in its functional form and copied back.
        row_arguments: Arguments of which only the last axis matters; flattened to ``[rows, last]``.
        float8: Whether it makes float8, which Triton doesn't on every GPU.
    """
    signature = declaration.signature
    names = list(signature.parameters)
    rows = frozenset(names.index(name) for name in row_arguments)
    tensor_indices = [names.index(name) for name in declaration.tensor_arguments]
    first = tensor_indices[0]

    def kernel(*args: Any) -> Any:
        if any(
            args[i] is not None and args[i].numel() == 0 for i in tensor_indices if i < len(args)
        ):
            return declaration.reference(*args)  # there is nothing to compute
        key = _class_of(declaration, args, rows)
        call = list(args)
        lead = call[first].shape[:-1]
        # One dispatch key set and grad mode for all callers: Dynamo compiles anew for each.
        with (
            torch.no_grad(),
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._ExcludeDispatchKeyGuard(_VIEWS),
        ):
            for index in tensor_indices:
                if index < len(call) and call[index] is not None:
                    shape = (-1, call[index].shape[-1]) if index in rows else call[index].shape
                    # Below these keys a view knows no base, whose sizes Dynamo would guard on.
                    call[index] = call[index].contiguous().view(shape)
            if call[first].nbytes >= LARGE and call[first].is_cpu:
                key = _of_widths(key, call)
            result = _run(declaration, key, call)
            if not rows:
                return result
            if isinstance(result, Tensor):
                return result.view(*lead, result.shape[-1])
            # What has one dimension is no rows: a sum over them.
            return tuple(o.view(*lead, o.shape[-1]) if o.dim() > 1 else o for o in result)

    def supports(*args: Any) -> str | None:
        reason = _exhausted.get(_class_of(declaration, args, rows)) if _exhausted else None
        if reason is None and args[first].device.type == "cpu":
            return no_compiler()
        if reason is None and float8:
            return _lacks_float8(args[first].device)
        return reason

    kernel.__name__ = declaration.name
    kernel.__signature__ = supports.__signature__ = signature  # type: ignore[attr-defined]
    return kernel, supports


@functools.cache
def _lacks_float8(device: torch.device) -> str | None:
    reason = rejection(CONVERTS_FLOAT8, Platform.detect(device))
    return None if reason is None else f"float8 in Triton: {reason}"


def no_compiler() -> str | None:
    """Give why nothing can be compiled for a CPU, or None; looked for again after ``refresh()``."""
    return _no_compiler(os.environ.get("CXX"), os.environ.get("PATH"), policy.generation)


@functools.lru_cache(maxsize=16)
def _no_compiler(own: str | None, path: str | None, generation: int) -> str | None:
    wanted = (own, *_COMPILERS)
    if any(name and shutil.which(name, path=path) for name in wanted):
        return None
    return f"no C++ compiler found (looked for $CXX, {', '.join(_COMPILERS)}); install g++"


def _class_of(declaration: Declaration, args: Sequence[Any], rows: frozenset[int]) -> _Key:
    """Give what Dynamo compiles anew for: dtypes, sizes of one, absent tensors, signs, flags."""
    return (declaration.name, *(_facts(value, i in rows) for i, value in enumerate(args)))


def _facts(value: Any, is_rows: bool) -> Any:
    if isinstance(value, Tensor):
        shape = (value.numel(), value.shape[-1]) if is_rows else value.shape
        ones = (shape[0] == shape[1], shape[1] == 1) if is_rows else [size == 1 for size in shape]
        return value.dtype, value.device, tuple(ones)
    if isinstance(value, float):  # an input of the graph, but for comparisons with zero
        return value > 0
    return value if value in (None, True, False, -1) else "int"


def _of_widths(key: _Key, args: Sequence[Any]) -> _Key:
    """Give the class of such calls of the same widths, or the one of all where those are many.

    C++ for widths and numbers that are known takes 0.85 of the time, and a number that isn't
    known becomes a tensor at each call; compiling takes seconds.
    """
    widths = (x.shape[1:] for x in args if isinstance(x, Tensor) and x.dim() > 1)
    own = (*key, *widths, *(x for x in args if isinstance(x, float)))
    known = _narrow.setdefault(key, set())
    if own not in known:
        if len(known) >= WIDTHS:
            return key
        known.add(own)
    return own


def _keep_widths(args: Sequence[Any]) -> None:
    """Tell Dynamo that all axes but the first are of one size."""
    for x in args:
        for axis in range(1, x.dim() if isinstance(x, Tensor) else 0):
            torch._dynamo.mark_static(x, axis)


def _run(declaration: Declaration, key: _Key, args: list[Any]) -> Any:
    function = _functions.get(key)
    try:
        return function(*args) if function is not None else _first_call(declaration, key, args)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        reason = (
            f"the recompile limit of {declaration.name} for such arguments is reached "
            f"({torch._dynamo.config.recompile_limit} graphs; raise "
            "torch._dynamo.config.recompile_limit before the first call)"
        )
        _exhausted[key] = reason
        raise BackendUnavailableError(
            f"op {declaration.name!r}: backend 'inductor' is not usable here: {reason}",
            op=declaration.name,
            backend="inductor",
            reasons=(reason,),
        ) from error


def _first_call(declaration: Declaration, key: _Key, args: list[Any]) -> Any:
    """Compile a copy of the reference for the class alone.

    Sizes that happen to be equal in this call get symbols of their own all the same.
    """
    if once.capturing() and key not in _functions:
        raise CaptureError(
            f"op {declaration.name!r}, backend 'inductor': not compiled for such arguments, and a "
            f"stream is capturing; prepare first: torch_ops.warmup({declaration.name!r}, ...) with "
            "them before the capture"
        )
    known = any(key in narrow for narrow in _narrow.values())
    with (
        _lock,
        symbolic.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        torch._dynamo.config.patch(specialize_float=known),
    ):
        if key not in _functions:
            _functions[key] = _own(declaration, f"{declaration.name}_{len(_functions)}")
            if known:
                _keep_widths(args)
        return _functions[key](*args)


def with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Copy a function with a code object of its own: Dynamo counts recompiles by code object."""
    plain: Any = inspect.unwrap(function)
    return types.FunctionType(
        plain.__code__.replace(co_name=name),
        plain.__globals__,
        name,
        plain.__defaults__,
        plain.__closure__,
    )


def _own(declaration: Declaration, name: str) -> Callable[..., Any]:
    own = with_own_code(declaration.reference, name)
    # Fused code would else keep in float32 what the reference rounds, as a stored residual.
    function: Callable[..., Any] = torch.compile(
        own, dynamic=True, fullgraph=True, options={"emulate_precision_casts": True}
    )
    return function
