"""Registered backends as subjects: called through `torch_ops.ops`, asked through the selector."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import torch_ops
from torch_ops.platform import platform_of
from torch_ops.registry import registry
from torch_ops.selector import judge
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.subject import Subject

_OPCHECKS = ("test_schema", "test_faketensor")


def registered(op: str, backend: str) -> Subject:
    """Makes a subject of a backend of an op.

    Raises:
        UnknownBackendError: The op has no such backend.
    """
    spec = registry.find(op, backend)
    name = spec.backend.value
    function = functools.partial(getattr(torch_ops.ops, op), backend=name)

    def refuses(args: Sequence[Any]) -> str | None:
        platform = platform_of(args)
        if platform is None:
            msg = f"op {op!r}: no tensor among the arguments: there is no platform to judge"
            raise ValueError(msg)
        candidate = judge(spec, platform, args)
        return None if candidate.usable else "; ".join(candidate.reasons)

    return Subject(name, function, refuses, _untestable(op, spec.target), registered=True)


def _untestable(op: str, target: str) -> Callable[[torch.dtype], str | None]:
    """A backend's package may define ``untestable(op, dtype) -> None | reason``.

    It says where a run on this machine proves nothing, as an interpreter whose bfloat16 is not
    that of the hardware.
    """
    package = target.partition(":")[0].rpartition(".")[0]

    def ask(dtype: torch.dtype) -> str | None:
        if not package:
            return None
        hook = getattr(importlib.import_module(package), "untestable", None)
        reason = None if hook is None else hook(op, dtype)
        if reason is not None and not isinstance(reason, str):
            msg = f"{package}.untestable: received {reason!r}, accepted None or a reason (str)"
            raise TypeError(msg)
        return reason

    return ask


def opcheck(op: str, backend: str, args: dict[str, Any], spec: str) -> None:
    """Runs `torch.library.opcheck` on the op's backend overload.

    Raises:
        ViolationError: Schema or fake kernel disagree with what the kernel does.
    """
    overload = getattr(torch.ops.torch_ops, op).backend
    values = tuple(a.detach() if isinstance(a, Tensor) else a for a in args.values())
    outcome = torch.library.opcheck(
        overload, (*values, backend), test_utils=_OPCHECKS, raise_exception=False
    )
    wrong = {name: str(seen) for name, seen in outcome.items() if seen != "SUCCESS"}
    if wrong:
        raise ViolationError("opcheck", "; ".join(f"{n}: {t}" for n, t in wrong.items()), spec)
