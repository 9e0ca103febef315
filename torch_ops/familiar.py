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

from torch_ops import calls, dynamo, policy
from torch_ops.declare import Declaration

__all__ = ["Familiar", "Look"]

_SHAPES = 256  # that are remembered for an op; more start anew
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
    """How an op's legal calls have looked lately.

    Attributes:
        tensors: How many leading arguments are tensors, or None in their places.
        looks: The latest look by the first tensor's shape. Forgotten with the plans.
        absent: A None for each tensor: what the dispatcher leaves out at the end.
    """

    def __init__(self, declaration: Declaration) -> None:
        self._declaration = declaration
        parameters = list(declaration.signature.parameters.values())
        self.tensors = len(declaration.tensor_arguments)
        self.looks: dict[torch.Size, Look] = policy.track({})
        self.absent = (None,) * self.tensors
        self._defaults = tuple(parameter.default for parameter in parameters)
        self._misses: dict[torch.Size, int] = policy.track({})
        names = tuple(parameter.name for parameter in parameters[: self.tensors])
        self.possible = names == declaration.tensor_arguments and (
            self.tensors > 0 and parameters[0].annotation is Tensor
        )

    def meet(self, args: tuple[Any, ...], call: Callable[..., Any]) -> None:
        """Check a call that looks unlike the latest of its shape, and maybe keep its look.

        The second call is kept, the fourth, the eighth: to keep one costs as much as a check.

        Raises:
            NoBackwardError: an argument requires grad.
            TypeError, ValueError: what the op's checks raise.
        """
        if _grad_enabled() and _any_requires_grad(*args):
            raise calls.refuse_grad(self._declaration.name)
        self._declaration.checker(*args)
        if not self.possible:
            return
        shape = args[0].shape
        misses = self._misses.get(shape, 0) + 1
        if len(self._misses) >= _SHAPES:
            self._misses.clear()
            self.looks.clear()
        self._misses[shape] = misses
        if misses & (misses - 1) == 0 and misses > 1:
            self._keep(shape, args, call)

    def _keep(self, shape: torch.Size, args: tuple[Any, ...], call: Callable[..., Any]) -> None:
        tensors = (args + self.absent)[: self.tensors]
        same = dynamo.resembling(tensors)
        if same is None:
            return
        complete = rest = args[self.tensors :] + self._defaults[max(len(args), self.tensors) :]
        while rest and rest[-1] == self._defaults[self.tensors + len(rest) - 1]:
            rest = rest[:-1]
        call = calls.alike(self._declaration, call, args)
        self.looks[shape] = Look(same, rest, complete, _any_requires_grad(*tensors), call)
