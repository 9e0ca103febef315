"""The Python callables of ``torch_ops.ops``: one plain function per op, with its own signature.

A call goes past PyTorch's dispatcher, which costs 2 to 3 us, where that would do nothing but call
our kernel: the tensors look like those that have reached the kernel before, so no dispatch key of
a subclass, a transform, autocast or a mode is among theirs; no Python mode is active, of which
this comparison leaves out some; no profiler wants to see the operator; and Dynamo isn't tracing.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_ops import ops
from torch_ops.backend import Backend
from torch_ops.declare import Declaration
from torch_ops.familiar import Familiar

__all__ = ["publish"]

_tracing = torch.compiler.is_dynamo_compiling  # a constant of traced code
_function_modes = torch._C._is_torch_function_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_profiling = torch._C._autograd._profiler_enabled
_grad_enabled = torch._C.is_grad_enabled
_bool, _dtype, _float, _int, _str = bool, torch.dtype, float, int, str

_TEMPLATE = """
def make(_Tensor, _Backend, _default, _named, _refuse, _refuse_backend, _looked):
    def {name}({parameters}, *, backend=None):
{shortcut}        if {not_tensors}:
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

_SHORTCUT = """
        if backend is None and {first}.__class__ is _Tensor and not (
            _tracing() or _function_modes() or _dispatch_modes() or _profiling()
        ):
            look = _looked({first}.shape)
            if look is not None:
                same, _, rest, without_grad, call = look
                if same({tensors}) and {exact}not (without_grad and _grad_enabled()):
                    return call({arguments})
"""


def publish(declaration: Declaration, familiar: Familiar) -> None:
    """Put the op's callable into ``torch_ops.ops``.

    A generated function: Dynamo traces it like hand-written code, and it costs one frame.
    """
    parameters = declaration.signature.parameters.values()
    tensors = [p for p in parameters if p.name in declaration.tensor_arguments]
    others = [p for p in parameters if p.name not in declaration.tensor_arguments]
    source = _TEMPLATE.format(
        name=declaration.name,
        parameters=", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters
        ),
        arguments=", ".join(declaration.signature.parameters),
        shortcut=_shortcut(tensors, others) if familiar.possible else "",
        not_tensors=" or ".join(map(_no_tensor, tensors)),
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
        familiar.looks.get,
    )
    function.__module__ = ops.__name__
    function.__qualname__ = declaration.name
    function.__doc__ = declaration.reference.__doc__
    function.__signature__ = _with_backend(declaration.signature)
    function.declaration = declaration
    function.backends = _lister(declaration.name)
    setattr(ops, declaration.name, function)


def _shortcut(tensors: list[inspect.Parameter], others: list[inspect.Parameter]) -> str:
    """Write the way past the dispatcher, for an op of which the tensors come first."""
    values = "".join(f"{parameter.name}, " for parameter in others)
    return _SHORTCUT.lstrip("\n").format(
        first=tensors[0].name,
        tensors=", ".join(parameter.name for parameter in tensors),
        exact="".join([*map(_exactly, others), f"rest == ({values}) and "]),
        arguments=", ".join(parameter.name for parameter in (*tensors, *others)),
    )


def _no_tensor(parameter: inspect.Parameter) -> str:
    """Write the test that a tensor argument is something else."""
    test = f"not isinstance({parameter.name}, _Tensor)"
    if parameter.annotation is not Tensor:
        test = f"{parameter.name} is not None and {test}"
    return f"({test})"


def _exactly(parameter: inspect.Parameter) -> str:
    """Write the test that a number has its own type, which the dispatcher would convert it to."""
    name = parameter.name
    options = typing.get_args(parameter.annotation) or (parameter.annotation,)
    tests = [
        f"{name} is None" if option is types.NoneType else f"{name}.__class__ is _{option.__name__}"
        for option in options
    ]
    return f"({' or '.join(tests)}) and "


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
