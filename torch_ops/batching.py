"""`torch.vmap` of ops whose rows are computed each alone: one call on the rows of all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library, register_vmap

from torch_ops.errors import TorchOpsError

__all__ = ["Rows", "register"]


class Rows(NamedTuple):
    """Which arguments of an op have rows.

    Attributes:
        names: Tensor arguments whose first axis stands for rows.
        merge: Whether the op takes one such axis and no more, so that vmap's has to join it.
    """

    names: tuple[str, ...]
    merge: bool


def register(library: Library, overload: str, declaration: Any) -> None:
    """Give an operator its batching rule; ``declaration.rows`` says how.

    Args:
        library: The library that defines it.
        overload: Its name in there, ``<op>`` or ``<op>.backend``.
        declaration: The declared op.
    """
    names = tuple(declaration.signature.parameters)
    name, _, kind = overload.partition(".")

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        packet = getattr(getattr(torch.ops, library.ns), name)
        operator = getattr(packet, kind or "default")
        at = dict(zip(names, in_dims, strict=False))
        batched = [name for name in names if at.get(name) is not None]
        for written in declaration.mutates:
            if written not in batched:
                raise TorchOpsError(
                    f"op {name!r}: argument {written!r}, which is written, isn't batched, and "
                    f"{', '.join(batched)} is (accepted: in_dims that batch it too)"
                )
        element = [_element(arg, dim) for arg, dim in zip(args, in_dims, strict=True)]
        declaration.checker(*element[: len(names)])
        if not info.batch_size:
            made = _nothing(declaration, element[: len(names)])
        elif set(batched) <= set(declaration.rows.names):
            made = _at_once(operator, declaration, at, info.batch_size, args)
        else:
            made = _one_by_one(operator, declaration, in_dims, info.batch_size, args)
        return made, None if made is None else _each(made, lambda out: 0)

    register_vmap(f"{library.ns}::{overload}", rule, lib=library)


def _each(made: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to what an op returns: a tensor, or several."""
    return function(made) if isinstance(made, Tensor) else tuple(map(function, made))


def _element(arg: Any, dim: int | None) -> Any:
    """Give an argument of the call for one of the batch; of no batch, one of that shape."""
    if dim is None:
        return arg
    if arg.shape[dim]:
        return arg.select(dim, 0)
    return arg.new_empty([size for axis, size in enumerate(arg.shape) if axis != dim % arg.dim()])


def _nothing(declaration: Any, element: list[Any]) -> Any:
    """Give the results of no call."""
    if declaration.mutates:
        return None
    return _each(declaration.faker(*element), lambda out: out.new_empty((0, *out.shape)))


def _at_once(
    operator: Callable[..., Any],
    declaration: Any,
    at: dict[str, int | None],
    size: int,
    args: tuple[Any, ...],
) -> Any:
    """Call the op once; what it writes and can't be viewed as rows is copied back."""
    given, rows = dict(zip(declaration.signature.parameters, args, strict=False)), declaration.rows
    fronts, count = {}, 0
    for name in rows.names:
        x, dim = given[name], at[name]
        if x is not None:
            fronts[name] = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            count = fronts[name].shape[1] if rows.merge else 0
    walked = {name: x.flatten(0, 1) if rows.merge else x for name, x in fronts.items()}
    made = operator(*(given | walked).values(), *args[len(given) :])
    for name in declaration.mutates:
        x, front = walked[name], fronts[name]
        if x.numel() and not torch._C._is_alias_of(front, x):  # type: ignore[attr-defined]
            front.copy_(x.view(front.shape))
    if made is None or not rows.merge:
        return made
    return _each(made, lambda out: out.unflatten(0, (size, count)))


def _one_by_one(
    operator: Callable[..., Any],
    declaration: Any,
    in_dims: Sequence[int | None],
    size: int,
    args: tuple[Any, ...],
) -> Any:
    """Call the op for each of the batch, as vmap does where an operator has no rule."""
    warnings.warn(
        f"op {declaration.name!r}: vmap over an argument without rows calls it {size} times "
        f"(once, where only {', '.join(declaration.rows.names)} are batched)",
        stacklevel=2,
    )
    parts = [
        (arg,) * size if dim is None else arg.unbind(dim)
        for arg, dim in zip(args, in_dims, strict=True)
    ]
    made = [operator(*each) for each in zip(*parts, strict=True)]
    if made[0] is None:
        return None
    if isinstance(made[0], Tensor):
        return torch.stack(made)
    return tuple(map(torch.stack, zip(*made, strict=True)))
