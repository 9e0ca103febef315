"""Eager calls that look like one before: what was checked for that one holds for this one.

PyTorch's own comparison of compiled code's guards tells, in C++: types, dispatch keys, dtypes,
devices, shapes, strides and ``requires_grad`` of all tensors at once, for the price of asking
Python for two or three of these. `Declaration.check` looks at nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops import calls, dynamo
from torch_ops.declare import Declaration

__all__ = ["Familiar", "Look"]

_LOOKS = 4  # an op's calls in one model differ in as many ways, and each costs a comparison
_SHAPES = 8
_grad_enabled = torch._C.is_grad_enabled
_any_requires_grad = torch._C._any_requires_grad


class Look(NamedTuple):
    """What a legal call looked like.

    Attributes:
        same: Whether tensors look like those of the call.
        rest: The arguments after the tensors, as the dispatcher gives them: without those at
            the end that are the defaults.
        complete: The same with the defaults.
        without_grad: Whether it was legal in no_grad alone, as a tensor requires grad.
        call: Runs such calls on the tensors' kind of device, without checks.
    """

    same: Callable[..., bool]
    rest: tuple[Any, ...]
    complete: tuple[Any, ...]
    without_grad: bool
    call: Callable[..., Any]


class Familiar:
    """How an op's legal calls have looked lately, the newest first.

    Attributes:
        tensors: How many leading arguments are tensors, or None in their places.
        looks: Replaced as one; a thread that reads it needs no lock.
    """

    def __init__(self, declaration: Declaration) -> None:
        self._declaration = declaration
        names = list(declaration.signature.parameters)
        self._defaults = tuple(p.default for p in declaration.signature.parameters.values())
        self.tensors = len(declaration.tensor_arguments)
        self.looks: tuple[Look, ...] = ()
        self._leading = names[: self.tensors] == list(declaration.tensor_arguments)
        self._shapes: tuple[torch.Size, ...] = ()

    def meet(self, args: tuple[Any, ...], call: Callable[..., Any]) -> None:
        """Check a call that looks like none, and keep how it looks if its shape came before.

        Raises:
            NoBackwardError: an argument requires grad.
            TypeError, ValueError: what the op's checks raise.
        """
        if _grad_enabled() and _any_requires_grad(*args):
            raise calls.refuse_grad(self._declaration.name)
        self._declaration.checker(*args)
        tensors = args[: self.tensors]
        if not self._leading or not tensors or len(args) < self.tensors:
            return
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            return  # an optional one is None
        shape = tensors[0].shape
        if shape not in self._shapes:
            self._shapes = (shape, *self._shapes[: _SHAPES - 1])
            return
        self._shapes = tuple(kept for kept in self._shapes if kept != shape)
        same = dynamo.resembling(tensors)
        if same is not None:
            complete = rest = args[self.tensors :] + self._defaults[len(args) :]
            while rest and rest[-1] == self._defaults[self.tensors + len(rest) - 1]:
                rest = rest[:-1]
            look = Look(same, rest, complete, _any_requires_grad(*tensors), call)
            self.looks = (look, *self.looks[: _LOOKS - 1])
