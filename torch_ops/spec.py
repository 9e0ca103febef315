"""`KernelSpec`: one kernel of one op by name, readable without importing it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch_ops.backend import Backend
from torch_ops.contracts import PROMISES
from torch_ops.errors import InvalidTargetError
from torch_ops.platform import Requirement

__all__ = ["KernelSpec"]


@dataclass(frozen=True, init=False)
class KernelSpec:
    """Where the kernel of an op lives and where it may run.

    Attributes:
        op: Logical op, ``snake_case``; it need not be declared.
        backend: Who wrote the kernel.
        target: ``"module:attr"``, imported by `load` and by nothing before it.
        requires: Conditions on the platform, of which any may hold; empty means anywhere.

    Raises:
        InvalidTargetError: ``target`` isn't of that form.
        ValueError: ``backend`` is unknown.
    """

    op: str
    backend: Backend
    target: str
    requires: frozenset[Requirement]

    def __init__(
        self,
        op: str,
        backend: Backend | str,
        target: str,
        requires: Iterable[Requirement] = frozenset(),
    ) -> None:
        if not isinstance(op, str) or not op.isidentifier():
            raise ValueError(f"KernelSpec.op must be a Python identifier, received {op!r}")
        if op in PROMISES:
            raise ValueError(f"KernelSpec.op {op!r} is the name of a promise (accepted: another)")
        module, colon, attr = target.partition(":") if isinstance(target, str) else ("", "", "")
        names = [*module.split("."), *attr.split(".")]
        if not colon or not all(name.isidentifier() for name in names):
            raise InvalidTargetError(
                f"KernelSpec.target must be 'module:attr', received {target!r} for op {op!r}"
            )
        requires = frozenset(requires)
        for requirement in requires:
            if not isinstance(requirement, Requirement):
                raise TypeError(
                    f"KernelSpec.requires of op {op!r} must hold Requirement values, "
                    f"received {requirement!r}"
                )
        object.__setattr__(self, "op", op)
        object.__setattr__(self, "backend", Backend(backend))
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "requires", requires)

    @property
    def module(self) -> str:
        """The module part of the target."""
        return self.target.partition(":")[0]

    @property
    def attr(self) -> str:
        """The attribute part of the target."""
        return self.target.partition(":")[2]

    def load(self) -> Callable[..., Any]:
        """Import the module and return the kernel.

        Raises:
            ImportError: the module, or something that it imports, is missing.
            AttributeError: the module has no such attribute.
            InvalidTargetError: what the target names can't be called.
        """
        found: Any = importlib.import_module(self.module)
        for name in self.attr.split("."):
            found = getattr(found, name)
        if not callable(found):
            raise InvalidTargetError(
                f"Kernel target {self.target!r} of op {self.op!r} is not callable: "
                f"received {type(found).__name__}"
            )
        return found  # type: ignore[no-any-return]
