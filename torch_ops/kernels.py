"""Loading kernels: once, with a sticky and explained failure. It makes no choices."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_ops import discovery, dynamo, locks, once
from torch_ops.errors import CaptureError, DeclarationError
from torch_ops.once import KernelLoadError
from torch_ops.spec import KernelSpec

__all__ = ["Kernel", "fail", "failure", "load", "refusal", "state"]

_log = logging.getLogger(__name__)
_lock = locks.reentrant()
_kernels: dict[KernelSpec, Kernel] = {}
_failures: dict[KernelSpec, Exception] = {}


@dataclass
class Kernel:
    """A loaded kernel.

    Attributes:
        spec: What it was loaded from.
        function: The backend's own function.
        supports: Its per-call predicate, or None where it takes every legal call.
        verified: Whether it has run once.
    """

    spec: KernelSpec
    function: Callable[..., Any]
    supports: Callable[..., str | None] | None
    verified: bool = field(default=False)


def load(spec: KernelSpec) -> Kernel:
    """Import a kernel and check it against the op's declaration; the same object ever after.

    Raises:
        DeclarationError: its signature differs from the declaration's.
        CaptureError: it isn't loaded yet and a stream of this thread is capturing.
        Exception: what the import raised, now and at every later call until ``refresh()``.
    """
    kernel = _kernels.get(spec)
    if kernel is not None:
        return kernel
    with _lock:
        kernel = _kernels.get(spec)
        if kernel is not None:
            return kernel
        if spec in _failures:
            raise _failures[spec]
        _refuse_in_capture(spec)
        try:
            kernel = _import(spec)
        except Exception as error:
            _failures[spec] = error
            _log.info("kernel %s failed to load: %s", spec.target, failure(spec))
            raise
        _kernels[spec] = kernel
        return kernel


def _import(spec: KernelSpec) -> Kernel:
    function = spec.load()
    module = sys.modules.get(spec.module)
    supports = None
    if module is not None and spec.module.rpartition(".")[2] == spec.op == spec.attr:
        supports = getattr(module, "supports", None)
        if spec.op == "attention" and hasattr(module, "prepare"):
            supports = getattr(module, "supports_call", None)  # `supports` is the layers' there
    declaration = _declaration(spec.op)
    if declaration is not None:
        _check_signature(spec, function, declaration.reference, "kernel", defaults=True)
        if supports is not None:
            _check_signature(spec, supports, declaration.reference, "supports", defaults=False)
            supports = _completed(supports, declaration.signature)
    for code in (getattr(function, "__code__", None), getattr(supports, "__code__", None)):
        if code is not None:
            dynamo.skip(code)
    return Kernel(spec, function, supports)


def _completed(
    supports: Callable[..., str | None], declared: inspect.Signature
) -> Callable[..., str | None]:
    """Pass the declared defaults, where the predicate has none of its own.

    The dispatcher drops trailing arguments that equal their defaults.
    """
    parameters = inspect.signature(supports).parameters.values()
    wanted = declared.parameters.values()
    if [p.default for p in parameters] == [p.default for p in wanted]:
        return supports
    defaults = [p.default for p in wanted]

    def complete(*args: Any) -> str | None:
        return supports(*args, *defaults[len(args) :])

    return complete


def refusal(kernel: Kernel, args: Sequence[Any]) -> str | None:
    """Ask a kernel's predicate why it can't serve a call; None where it can.

    Raises:
        DeclarationError: it answers neither None nor a reason.
    """
    answer: object = kernel.supports(*args) if kernel.supports is not None else None
    if answer is None or (isinstance(answer, str) and answer):
        return answer
    raise DeclarationError(
        f"op {kernel.spec.op!r}, backend {kernel.spec.backend.value!r}: supports() returned "
        f"{answer!r} (accepted: None where it serves the call, or a str that says why not)"
    )


def _declaration(op: str) -> Any:
    from torch_ops.declarations import catalogue

    return catalogue().get(op)


def _check_signature(
    spec: KernelSpec,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    role: str,
    *,
    defaults: bool,
) -> None:
    """Compare parameters: names, order, kinds and, for kernels, defaults and annotations."""
    want, got = inspect.signature(reference), inspect.signature(function)
    same = [(p.name, p.kind) for p in want.parameters.values()] == [
        (p.name, p.kind) for p in got.parameters.values()
    ]
    pairs = list(zip(want.parameters.values(), got.parameters.values(), strict=False))
    same = same and all(
        b.default == a.default or (not defaults and b.default is b.empty) for a, b in pairs
    )
    if defaults:
        same = same and all(_same_type(a.annotation, b.annotation) for a, b in pairs)
        same = same and _same_type(want.return_annotation, got.return_annotation)
    if not same:
        code = getattr(function, "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code else spec.target
        raise DeclarationError(
            f"op {spec.op!r}, backend {spec.backend.value!r}: the {role}'s signature differs "
            f"from the declaration. Declared: {spec.op}{want}. Received: {role}{got} at {where}."
        )


def _same_type(declared: Any, received: Any) -> bool:
    if received is inspect.Parameter.empty:
        return True
    return _type_name(declared) == _type_name(received)


def _type_name(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace("torch.", "").replace(" ", "").replace("Optional[Tensor]", "Tensor|None")


def _refuse_in_capture(spec: KernelSpec) -> None:
    if once.capturing():
        raise CaptureError(
            f"op {spec.op!r}, backend {spec.backend.value!r}: not loaded, and a stream is "
            f"capturing; prepare first: torch_ops.warmup({spec.op!r}, ...) before the capture"
        )


def fail(kernel: Kernel, reason: str) -> None:
    """Note that a kernel's code couldn't be loaded or compiled at its first run."""
    with _lock:
        _failures[kernel.spec] = KernelLoadError(reason)
        _kernels.pop(kernel.spec, None)
    _log.info("kernel %s failed at its first run: %s", kernel.spec.target, reason)


def failure(spec: KernelSpec) -> str | None:
    """Give type and text of what loading raised, or None."""
    error = _failures.get(spec)
    if error is None or isinstance(error, KernelLoadError):
        return None if error is None else str(error)
    return f"{type(error).__name__}: {error}"


def refuse_mismatch(spec: KernelSpec) -> None:
    """Raise the `DeclarationError` with which loading the kernel was refused, if it was."""
    error = _failures.get(spec)
    if isinstance(error, DeclarationError):
        raise DeclarationError(str(error))  # a new one: tracebacks pile up on one that is reused


def missing(spec: KernelSpec) -> str | None:
    """Give why the target's top-level package can't be found, or None. Imports nothing."""
    top = spec.module.partition(".")[0]
    if top in sys.modules:
        found = sys.modules[top] is not None
    else:
        try:
            found = importlib.util.find_spec(top) is not None
        except (ImportError, ValueError):
            found = False
    return None if found else f"not installed: no module named {top!r}"


def state(spec: KernelSpec) -> str:
    """Give how far a kernel has come: declared, found, imported, verified or failed."""
    if spec in _failures:
        return "failed"
    kernel = _kernels.get(spec)
    if kernel is not None:
        return "verified" if kernel.verified else "imported"
    package = discovery.package(spec.backend)
    if package is not None and spec.target.startswith(f"{package.module}."):
        if package.problem and not package.conflict:
            return "failed"
        if package.problem or package.unavailable:
            return "declared"
    return "declared" if missing(spec) else "found"


def forget_failures() -> None:
    """Let failed kernels be tried again."""
    with _lock:
        _failures.clear()
    once.forget_failures()
