"""What the dispatcher calls: one kernel per device key and op, and its fake.

The kernel checks the arguments and runs the plan of the present policy, kept in a slot by scope.
It is installed under the device keys of an operator that ``torch.library.custom_op`` declares;
custom_op's own Python layers cost 8 to 14 us a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, custom_op, fallthrough_kernel

from torch_ops import (
    batching,
    callables,
    calls,
    compiled,
    dynamo,
    inlined,
    inlining,
    policy,
    schema,
    selector,
    training,
    transforms,
    tuning,
)
from torch_ops.backend import Backend
from torch_ops.calls import refuse_grad
from torch_ops.declare import Declaration
from torch_ops.errors import TorchOpsError, TuningTableError, UnknownVariableError
from torch_ops.familiar import Familiar
from torch_ops.platform import Platform
from torch_ops.registry import registry
from torch_ops.transforms import any_tangent

__all__ = ["register"]

NAMESPACE = "torch_ops"
_DEVICE_KEYS = ("CPU", "CUDA")
_AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA")
_AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradMPS", "AutogradMeta")
_library = Library(NAMESPACE, "FRAGMENT")  # kept for ever: a collected library crashes its ops
_kernels: dict[str, tuple[Familiar, dict[str, Callable[..., Any]]]] = {}
_grad_enabled = torch._C.is_grad_enabled
_any_requires_grad = torch._C._any_requires_grad
_forward_ad = torch.autograd.forward_ad


def register(declaration: Declaration) -> None:
    """Make a declaration an operator: default overload, ``.backend`` overload, callable."""
    name = declaration.name
    refuse = _refuse_device(declaration)
    custom_op(
        f"{NAMESPACE}::{name}",
        refuse,
        mutates_args=declaration.mutates,
        schema=declaration.schema,
    )
    _library.define(f"{name}.backend{schema.backend_overload(declaration.schema)}")
    _library.impl(f"{name}.backend", refuse, "CompositeExplicitAutograd")
    familiar = Familiar(declaration)
    legal = {key: calls.legal(declaration, named=False) for key in _DEVICE_KEYS}
    chosen = {key: calls.legal(declaration, named=True) for key in _DEVICE_KEYS}
    for overload, named, run in ((name, False, legal), (f"{name}.backend", True, chosen)):
        in_graph = run
        if declaration.mutates:
            in_graph = {
                key: calls.legal(declaration, named=named, in_graph=True) for key in _DEVICE_KEYS
            }
        compiled.define(declaration, named, in_graph)
        kernels = [_kernel(familiar, run[key], legal[key], named) for key in _DEVICE_KEYS]
        fake = _fake(declaration, named)
        install(overload, kernels, fake, bool(declaration.mutates))
        by_key = zip((*_DEVICE_KEYS, "Meta"), (*kernels, fake), strict=True)
        _kernels[overload] = familiar, dict(by_key)
    if not declaration.mutates:
        inlined.define(declaration)
    callables.publish(declaration, familiar)


def differentiate(declaration: Declaration) -> None:
    """Give a declared op, whose `Gradient` is set, its kernels under Autograd's keys."""
    for overload, named in ((declaration.name, False), (f"{declaration.name}.backend", True)):
        familiar, kernels = _kernels[overload]
        for key, kernel in kernels.items():
            autograd = training.kernel(declaration, familiar, kernel, named)
            dynamo.skip(autograd.__code__)
            _library.impl(overload, autograd, f"Autograd{key}", allow_override=True)


def batch(declaration: Declaration) -> None:
    """Give a declared op, whose `Rows` are set, its batching rule."""
    for overload in (declaration.name, f"{declaration.name}.backend"):
        batching.register(_library, overload, declaration)
    if not declaration.mutates:
        inlined.batch(declaration)


def install(
    overload: str, kernels: list[Callable[..., Any]], fake: Callable[..., Any], mutates: bool
) -> None:
    """Give an operator its fake and its kernels for CPU and CUDA, and nothing in between.

    Autograd falls through, so the kernel has to refuse gradients itself; it also has to bump the
    version of what it writes. Dynamo must not trace into it after a graph break. Autocast is off
    below the operator, as it is in compiled graphs: products inside would be made in half
    precision, and in eager code alone.
    """
    _library._register_fake(overload, _told_by_dynamo(fake), _stacklevel=0, allow_override=True)
    for key, kernel in zip(_DEVICE_KEYS, kernels, strict=True):
        dynamo.skip(kernel.__code__)
        _library.impl(overload, kernel, key)
    for key in _AUTOGRAD_KEYS:
        _library.impl(overload, fallthrough_kernel, key)
    for key in _AUTOCAST_KEYS:
        _library.impl(overload, _below_autocast(overload), key)
    if mutates:
        _library.impl(overload, fallthrough_kernel, "ADInplaceOrView", allow_override=True)
    transforms.guard(_library, overload, lambda: refuse_grad(overload.partition(".")[0]))


def _told_by_dynamo(fake: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo raise what the fake raises; it makes a graph break of two classes of errors."""

    def told(*args: Any) -> Any:
        try:
            return fake(*args)
        except (TypeError, NotImplementedError) as error:
            if not dynamo.tracing():
                raise
            raise TorchOpsError(f"{type(error).__name__}: {error}") from error

    return told


def _below_autocast(overload: str) -> Callable[..., Any]:
    name, _, overload_name = overload.partition(".")

    def kernel(*args: Any) -> Any:
        packet = getattr(torch.ops.torch_ops, name)
        with torch._C._DisableAutocast():
            return getattr(packet, overload_name or "default")(*args)

    dynamo.skip(kernel.__code__)
    return kernel


def _refuse_device(declaration: Declaration) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        for name, arg in zip(declaration.signature.parameters, args, strict=False):
            if isinstance(arg, Tensor) and (arg.layout != torch.strided or arg.is_quantized):
                raise _refuse_kind(declaration.name, name, arg)
        devices = sorted({str(arg.device) for arg in args if isinstance(arg, Tensor)})
        raise TorchOpsError(
            f"op {declaration.name!r}: no kernels for device {', '.join(devices)} "
            "(accepted: cpu, cuda; ROCm tensors have device type cuda)"
        )

    return refuse


def _refuse_kind(op: str, argument: str, x: Tensor) -> TorchOpsError:
    kind, plain = (
        (f"quantized ({x.dtype})", f"{argument}.dequantize()")
        if x.is_quantized
        else (f"of layout {x.layout}", f"{argument}.to_dense()")
    )
    return TorchOpsError(
        f"op {op!r}: argument {argument!r} is {kind} (accepted: plain tensors of layout "
        f"torch.strided, as from {plain})"
    )


def _kernel(
    familiar: Familiar, call: Callable[..., Any], legal: Callable[..., Any], named: bool
) -> Callable[..., Any]:
    """Build the kernel of one overload and device key. It is on the hot path of every call.

    Args:
        familiar: The op's legal calls of late.
        call: Runs a legal call of this overload.
        legal: Runs one of the default overload on the same device.
        named: Whether the last argument is the name of a backend.
    """
    count, absent = familiar.tensors, familiar.absent
    looked = familiar.looks.get

    def kernel(*args: Any) -> Any:
        look = looked(args[0].shape) if possible else None
        if look is not None:
            same, rest, _, without_grad, alike = look
            tensors = args[:count] if len(args) >= count else args + absent[len(args) :]
            if args[count:] == rest and same(*tensors) and not (without_grad and _grad_enabled()):
                return alike(*args)
        familiar.meet(args, legal)
        return call(*args)

    def kernel_named(*args: Any) -> Any:
        look = looked(args[0].shape) if possible else None
        if look is not None:
            same, _, rest, without_grad, _ = look
            known = args[count:-1] == rest and same(*args[:count])
            if known and not (without_grad and _grad_enabled()):
                return call(*args)
        familiar.meet(args[:-1], legal)
        return call(*args)

    possible = familiar.possible
    return kernel_named if named else kernel


def _fake(declaration: Declaration, named: bool) -> Callable[..., Any]:
    op = declaration.name

    def fake(*args: Any) -> Any:
        backend = None
        if named:
            args, backend = args[:-1], args[-1]
            registry.find(op, selector.ran_forward(backend) or backend)
        wants_grad = _grad_enabled() and _any_requires_grad(*args)
        if (wants_grad and not inlined.differentiates(declaration, args, backend)) or (
            _forward_ad._current_level >= 0 and any_tangent(args)
        ):
            raise refuse_grad(op)
        declaration.check_call(*args)
        _refuse_misplaced(declaration, args)
        depend_on_policy(op, args, backend)
        inlined.dissolve()
        compiled.lower(op, named)
        return declaration.reference(*args) if wants_grad else declaration.faker(*args)

    return fake


def _refuse_misplaced(declaration: Declaration, args: tuple[Any, ...]) -> None:
    """Refuse to trace what Inductor would compile to wrong results without a word."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    for name, value in zip(declaration.signature.parameters, args, strict=False):
        if name in declaration.mutates and dynamo.misplaced(value, tensors):
            raise TorchOpsError(
                f"op {declaration.name!r}: argument {name!r}, which is written, lies at an offset "
                "of a storage it shares that varies with the sizes of a compiled graph; PyTorch's "
                "Inductor writes it in a wrong place (pytorch#198068). Accepted: a storage of its "
                "own, or sizes that don't vary (dynamic=False, torch._dynamo.mark_static)"
            )


def depend_on_policy(op: str, args: tuple[Any, ...], backend: str | None) -> None:
    """Make a frame that is being traced compile anew when another kernel would run."""
    dynamo.tag_caches(fingerprint)
    device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
    if device is None or device.type not in ("cpu", "cuda") or selector.ran_forward(backend):
        return
    depend((op, backend, device), lambda: signature(op, device, backend))


def depend(key: object, snapshot: Callable[[], object]) -> None:
    """Guard the frame that is being traced by a snapshot of the policy; see `dynamo.depend`."""
    lacking = dynamo.depend(key, snapshot, lambda: policy.generation)
    if lacking is not None:
        policy.freeze(lacking)


_fingerprints: dict[int, str] = {}


def fingerprint() -> str:
    """Give the fingerprint of registry and tables, computed once a generation."""
    generation = policy.generation
    made = _fingerprints.get(generation)
    if made is None:
        try:
            tables = tuning.digest() + inlining.digest()
        except (UnknownVariableError, TuningTableError):  # the call raises it, in its own class
            tables = ""
        made = f"{registry.fingerprint()}.{tables}".removesuffix(".")
        _fingerprints.clear()
        _fingerprints[generation] = made
    return made


def signature(op: str, device: torch.device, backend: str | None = None) -> tuple[object, ...]:
    """Name the kernels that a call may run now; equal names run equal kernels.

    The list ends with the reference, which takes every legal call. Where nobody has chosen, what
    a table decides by shapes comes first.
    """
    platform = Platform.detect(device)
    targets: list[object] = []
    try:
        plan = selector.make_plan(op, platform, backend=backend, scope=policy.current_scope())
        if not plan.explicit:
            targets += tuning.state(op, platform)
    except TorchOpsError as error:
        return ("error", type(error).__name__)
    for spec in plan.specs:
        targets.append(spec.target)
        if spec.backend is Backend.TORCH:
            break
    targets.append(inlining.state(op, platform, backend))
    return tuple(targets)
