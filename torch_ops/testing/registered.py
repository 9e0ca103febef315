"""Registered backends as subjects: called through `torch_ops.ops`, asked through the selector."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

import torch_ops
from torch_ops.backend import Backend
from torch_ops.declarations import catalogue
from torch_ops.platform import platform_of
from torch_ops.promises import package_of, promised
from torch_ops.registry import registry
from torch_ops.selector import judge
from torch_ops.testing import traced
from torch_ops.testing.arguments import build
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.proof import Proof
from torch_ops.testing.spec import Spec
from torch_ops.testing.subject import Subject, asked, subject_of

CPU = torch.device("cpu")


def registered(op: str, backend: str, device: torch.device = CPU) -> Subject:
    """Makes a subject of a backend of an op, which promises what it does on a device.

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
        candidate = asked(functools.partial(judge, strict=True), spec, platform, args)
        return None if candidate.usable else "; ".join(candidate.reasons)

    on_rocm = device.type == "cuda" and torch.version.hip is not None
    package = package_of(spec)
    kept = promised(op, package, "rocm" if on_rocm else device.type)
    broken = package is not None and package.problem is not None  # every call is refused, and why
    untestable = _untestable(op, "" if broken else spec.target)
    return Subject(name, function, refuses, untestable, registered=True, promises=kept)


def subject_for(
    op: str, backend: str | Backend | Callable[..., Any], place: torch.device
) -> Subject:
    """Makes a subject of a backend of an op, or of a callable.

    Raises:
        UnknownOpError: The op isn't declared.
        UnknownBackendError: The op has no such backend.
        TypeError: `backend` is something else.
    """
    if op not in catalogue():
        torch_ops.select_kernel(op)  # raises the error of an unknown op
    if not isinstance(backend, str | Backend) and not callable(backend):
        msg = (
            f"verify: backend: received {backend!r}, accepted the name of a registered backend, or "
            "a callable with the op's signature"
        )
        raise TypeError(msg)
    if isinstance(backend, Backend):
        backend = backend.value
    return registered(op, backend, place) if isinstance(backend, str) else subject_of(backend)


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
    """Checks schema and fake kernel of the op's backend overload against what the kernel does.

    Raises:
        ViolationError: They disagree.
    """
    try:
        traced.opcheck(op, backend, args, ("test_schema", "test_faketensor"))
        traced.check_fake(op, backend, args)
    except ViolationError as broken:
        raise ViolationError(broken.layer, broken.detail, spec) from broken.__cause__


def check_traced(op: str, backend: str, device: torch.device, spec: Spec) -> None:
    """Checks that AOT dispatch with dynamic shapes gives what eager calls give.

    Mutating ops too: they are traced in their functional form. No input requires grad: what
    computes gradients are ops, with proofs of their own.

    Raises:
        ViolationError: It doesn't.
    """
    try:
        args = build(traced.tame(spec), device)
        traced.check_fake(op, backend, args)
        traced.opcheck(op, backend, args, ("test_aot_dispatch_dynamic",))
    except ViolationError as broken:
        raise ViolationError(broken.layer, broken.detail, spec.to_json()) from broken.__cause__


def check_compiled(
    subject: Subject, proof: Proof, contract: Any, device: torch.device, spec: Spec
) -> None:
    """Checks a call in a compiled graph against the oracle and an eager call.

    Raises:
        ViolationError: The graph breaks, or computes something else.
    """
    try:
        traced.check_compiled(subject, proof, contract, device, spec)
    except ViolationError as broken:
        raise ViolationError(broken.layer, broken.detail, spec.to_json()) from broken.__cause__
