"""The Python callables of ``torch_ops.ops``: one plain function per op, with its own signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_ops import ops
from torch_ops.backend import Backend
from torch_ops.declare import Declaration

__all__ = ["publish"]

_TEMPLATE = """
def make(_Tensor, _Backend, _default, _named, _refuse, _refuse_backend):
    def {name}({parameters}, *, backend=None):
        if {not_tensors}:
            _refuse({arguments})
        if backend is None:
            return _default({arguments})
        if isinstance(backend, str):
            return _named({arguments}, backend)
        if isinstance(backend, _Backend):
            return _named({arguments}, backend.value)
        _refuse_backend(backend)
    return {name}
"""


def publish(declaration: Declaration) -> None:
    """Put the op's callable into ``torch_ops.ops``.

    A generated function: Dynamo traces it like hand-written code, and it costs one frame.
    """
    parameters = declaration.signature.parameters.values()
    tests = []
    for parameter in parameters:
        if parameter.name in declaration.tensor_arguments:
            test = f"not isinstance({parameter.name}, _Tensor)"
            optional = parameter.annotation is not Tensor
            test = f"{parameter.name} is not None and {test}" if optional else test
            tests.append(f"({test})")
    source = _TEMPLATE.format(
        name=declaration.name,
        parameters=", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters
        ),
        arguments=", ".join(declaration.signature.parameters),
        not_tensors=" or ".join(tests),
    )
    packet = getattr(torch.ops.torch_ops, declaration.name)
    made: dict[str, Any] = {}
    exec(compile(source, f"<torch_ops.ops.{declaration.name}>", "exec"), globals(), made)
    function = made["make"](
        Tensor,
        Backend,
        packet.default,
        packet.backend,
        _refuser(declaration),
        _backend_refuser(declaration.name),
    )
    function.__module__ = ops.__name__
    function.__qualname__ = declaration.name
    function.__doc__ = declaration.reference.__doc__
    function.__signature__ = _with_backend(declaration.signature)
    function.declaration = declaration
    function.backends = _lister(declaration.name)
    setattr(ops, declaration.name, function)


def _with_backend(signature: inspect.Signature) -> inspect.Signature:
    backend = inspect.Parameter(
        "backend", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Backend | str | None
    )
    return signature.replace(parameters=[*signature.parameters.values(), backend])


def _refuser(declaration: Declaration) -> Callable[..., NoReturn]:
    def refuse(*args: Any) -> NoReturn:
        pairs = zip(declaration.signature.parameters.values(), args, strict=True)
        for parameter, value in pairs:
            optional = parameter.annotation is not Tensor
            if parameter.name not in declaration.tensor_arguments or (optional and value is None):
                continue
            if not isinstance(value, Tensor):
                accepted = "a Tensor or None" if optional else "a Tensor"
                raise TypeError(
                    f"op {declaration.name!r}: argument {parameter.name!r} must be {accepted}, "
                    f"received {type(value).__name__}"
                )
        raise AssertionError("called with tensors only")

    return refuse


def _backend_refuser(op: str) -> Callable[[object], NoReturn]:
    def refuse(backend: object) -> NoReturn:
        raise TypeError(
            f"op {op!r}: argument 'backend' must be a Backend or str, "
            f"received {type(backend).__name__}"
        )

    return refuse


def _lister(op: str) -> Callable[[], list[Backend]]:
    def backends() -> list[Backend]:
        """List the backends with a kernel registered for this op, usable here or not."""
        from torch_ops.registry import registry

        return [spec.backend for spec in registry.get(op)]

    return backends
