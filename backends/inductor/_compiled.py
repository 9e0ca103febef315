"""Compiles an op's reference once per dtype, on rows flattened to two dimensions."""

from __future__ import annotations

import inspect
import os
import shutil
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.declare import Declaration
from torch_ops.errors import BackendUnavailableError

__all__ = ["compiled", "no_compiler"]

_COMPILERS = ("g++", "clang++")
_lock = threading.Lock()
_functions: dict[tuple[str, torch.dtype], Callable[..., Any]] = {}
_exhausted: dict[tuple[str, torch.dtype], str] = {}


def compiled(
    declaration: Declaration, rows: tuple[str, ...] = ()
) -> tuple[Callable[..., Any], Callable[..., str | None]]:
    """Give an op's kernel and its predicate.

    Args:
        declaration: The op; one that mutates is compiled in its functional form and copied back.
        rows: Arguments of which only the last axis matters; flattened to ``[rows, last]``.
    """
    signature = declaration.signature
    names = list(signature.parameters)
    row_indices = [names.index(name) for name in rows]
    tensor_indices = [names.index(name) for name in declaration.tensor_arguments]
    first = tensor_indices[0]

    def kernel(*args: Any) -> Any:
        if any(
            args[i] is not None and args[i].numel() == 0 for i in tensor_indices if i < len(args)
        ):
            return declaration.reference(*args)  # there is nothing to compute
        call = list(args)
        lead = call[first].shape[:-1]
        for index in tensor_indices:
            if index < len(call) and call[index] is not None:
                call[index] = call[index].contiguous()
        for index in row_indices:
            call[index] = call[index].view(-1, call[index].shape[-1])
        result = _run(declaration, args[first].dtype, call)
        if not row_indices:
            return result
        if isinstance(result, Tensor):
            return result.view(*lead, result.shape[-1])
        return tuple(output.view(*lead, output.shape[-1]) for output in result)

    def supports(*args: Any) -> str | None:
        reason = _exhausted.get((declaration.name, args[first].dtype))
        if reason is None and args[first].device.type == "cpu":
            return no_compiler()
        return reason

    kernel.__name__ = declaration.name
    kernel.__signature__ = supports.__signature__ = signature  # type: ignore[attr-defined]
    return kernel, supports


def no_compiler() -> str | None:
    """Give why nothing can be compiled for a CPU, or None."""
    wanted = (os.environ.get("CXX"), *_COMPILERS)
    if any(name and shutil.which(name) for name in wanted):
        return None
    return f"no C++ compiler found (looked for $CXX, {', '.join(_COMPILERS)}); install g++"


def _run(declaration: Declaration, dtype: torch.dtype, args: list[Any]) -> Any:
    key = (declaration.name, dtype)
    function = _functions.get(key) or _compile(declaration, key)
    try:
        # One dispatch key set and grad mode for all callers: Dynamo compiles anew for each.
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            return function(*args)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        reason = (
            f"the recompile limit of {declaration.name} for {dtype} is reached "
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


def _compile(declaration: Declaration, key: tuple[str, torch.dtype]) -> Callable[..., Any]:
    """Give the reference a code object of its own: Dynamo counts recompiles by code object."""
    with _lock:
        if key not in _functions:
            reference: Any = inspect.unwrap(declaration.reference)
            name = f"{declaration.name}_{str(key[1]).removeprefix('torch.')}"
            own = types.FunctionType(
                reference.__code__.replace(co_name=name),
                reference.__globals__,
                name,
                reference.__defaults__,
                reference.__closure__,
            )
            _functions[key] = torch.compile(own, dynamic=True, fullgraph=True)
    return _functions[key]
