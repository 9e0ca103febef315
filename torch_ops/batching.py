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

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        operator = _operator(overload)
        at = dict(zip(names, in_dims, strict=False))
        batched = {name for name in names if at.get(name) is not None}
        for name in declaration.mutates:
            if name not in batched:
                raise TorchOpsError(
                    f"op {declaration.name!r}: argument {name!r}, which is written, isn't batched, "
                    f"and {', '.join(sorted(batched))} is (accepted: in_dims that batch it too)"
                )
        if batched <= set(declaration.rows.names):
            made = _at_once(operator, declaration.rows, names, at, info.batch_size, args)
        else:
            made = _one_by_one(operator, declaration, in_dims, info.batch_size, args)
        return made, (None if made is None else 0 if isinstance(made, Tensor) else (0,) * len(made))

    register_vmap(f"{library.ns}::{overload}", rule, lib=library)


def _operator(overload: str) -> Callable[..., Any]:
    name, _, kind = overload.partition(".")
    operator: Callable[..., Any] = getattr(getattr(torch.ops.torch_ops, name), kind or "default")
    return operator


def _at_once(
    operator: Callable[..., Any],
    rows: Rows,
    names: tuple[str, ...],
    at: dict[str, int | None],
    size: int,
    args: tuple[Any, ...],
) -> Any:
    """Call the op once; what it writes and can't be viewed as rows is copied back."""
    given = dict(zip(names, args, strict=False))
    walked = {name: given[name] for name in rows.names if given[name] is not None}
    for name, x in walked.items():
        dim = at[name]
        front = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        walked[name] = front.flatten(0, 1) if rows.merge else front
    made = operator(*(given | walked).values(), *args[len(names) :])
    if made is None:
        for name, x in walked.items():
            front = given[name].movedim(at[name], 0)
            if front.numel() and not torch._C._is_alias_of(front, x):  # type: ignore[attr-defined]
                front.copy_(x.view(front.shape))
        return None
    outputs = (made,) if isinstance(made, Tensor) else tuple(made)
    if rows.merge:
        outputs = tuple(out.unflatten(0, (size, out.shape[0] // size)) for out in outputs)
    return outputs[0] if isinstance(made, Tensor) else outputs


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
