"""Gradients of ops that have a backward: autograd's node, and the kernel that makes it.

The backward of an op is another op, run by the backend that ran forward, whatever the policy is by
then. A call without gradients costs what it costs on an op that has none: the kernel under
Autograd's keys is then the one of the device itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops import calls, dynamo, kernels, policy, selector, tuning
from torch_ops.errors import NoBackwardError, listing
from torch_ops.familiar import Familiar
from torch_ops.platform import Platform, platform_of
from torch_ops.registry import registry
from torch_ops.spec import KernelSpec
from torch_ops.transforms import any_tangent

__all__ = [
    "Gradient",
    "Run",
    "Saved",
    "check_constants",
    "choose",
    "kernel",
    "lacking",
    "refuse",
]

Run = Callable[..., Any]
"""Calls the op that is the backward, on the backend that ran forward."""
Saved = dict[str, Any]
"""What was kept of a call: arguments by name, outputs as ``out0``, ``out1``."""
NONE = "no backward"
"""Why a backend isn't usable where a gradient is wanted, and it has none."""
_LOOKS = 256  # that a table decides, for an op; more start anew
_known: dict[Any, str | dict[Any, str]] = policy.track({})
_grad_enabled = torch._C.is_grad_enabled
_any_requires_grad = torch._C._any_requires_grad
_forward_ad = torch.autograd.forward_ad
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_PLAIN = (Tensor, torch.nn.Parameter)
_ODD_KEYS = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in ("Python", "Negative", "Conjugate", "ZeroTensor", "Functionalize", "Sparse")
)


class Gradient(NamedTuple):
    """How gradients of an op's inputs come from those of its outputs.

    Attributes:
        op: The declared op that computes them.
        saves: Names of the tensors that are kept until then.
        function: Takes `Run`, the outputs' gradients and `Saved`; gives a gradient, or None, for
            each tensor argument.
        constants: Arguments without a gradient: none of them may require one.
        forward: The op that runs forward in the declared one's place, with more outputs; None if
            that itself does.
        sparse: Whether an output without a gradient has None in its place, instead of zeros.
        whole: Whether calls with gradients never dissolve in compiled graphs.
    """

    op: str
    saves: tuple[str, ...]
    function: Callable[[Run, Sequence[Any], Saved], Sequence[Tensor | None]]
    constants: tuple[str, ...] = ()
    forward: str | None = None
    sparse: bool = False
    whole: bool = False

    def needs(self, backend: str) -> list[KernelSpec] | None:
        """Give the specs that a backend must have beside the op's own; None if it lacks one."""
        ops = [self.op] if self.forward is None else [self.op, self.forward]
        found = [spec for op in ops for spec in registry.get(op) if spec.backend.value == backend]
        return found if len(found) == len(ops) else None


def refuse(op: str, backend: str | None = None, unusable: Sequence[str] = ()) -> NoBackwardError:
    """Build the error for inputs that require grad where nothing has a backward.

    Args:
        op: The op.
        backend: The one that somebody asked for.
        unusable: Why backwards that there are can't be used.
    """
    who = "no backend of the op has" if backend is None else f"backend {backend!r} doesn't have"
    names = [spec.backend.value for spec in registry.get(op)]
    gradient = _gradient_of(op)
    able = [name for name in names if gradient is not None and gradient.needs(name)]
    others = f"; backends with one: {listing(able)}" if able and backend is not None else ""
    why = f" that is usable here: {'; '.join(unusable)}" if unusable else ""
    return NoBackwardError(
        f"op {op!r}: an input requires grad and {who} a backward{why} (accepted: inputs without "
        f"grad, or calls under torch.no_grad() or torch.inference_mode(){others}); detach the "
        "input or leave grad mode",
        op=op,
    )


def _refuse_second(op: str) -> NoBackwardError:
    return NoBackwardError(
        f"op {op!r} has first derivatives only, and its gradients are to be differentiated "
        "(accepted: create_graph=False)",
        op=op,
    )


def check_constants(declaration: Any, args: Sequence[Any]) -> None:
    """Refuse a call in which an argument without a gradient requires one.

    Raises:
        NoBackwardError: there is such an argument.
    """
    op, constants = declaration.name, declaration.gradient.constants
    for name, value in zip(declaration.signature.parameters, args, strict=True):
        if name in constants and _any_requires_grad(value):
            others = [n for n in declaration.tensor_arguments if n not in constants]
            raise NoBackwardError(
                f"op {op!r}: argument {name!r} requires grad, and the op has gradients of "
                f"{listing(others)} alone (accepted: {name}.detach(), or calls under "
                "torch.no_grad() or torch.inference_mode())",
                op=op,
            )


def _gradient_of(op: str) -> Gradient | None:
    from torch_ops.declarations import catalogue

    declaration = catalogue().get(op)
    return None if declaration is None else declaration.gradient


def lacking(op: str, backend: str, platform: Platform) -> str | None:
    """Give why a backend can't differentiate a differentiable op, or None."""
    gradient = _gradient_of(op)
    needed = None if gradient is None else gradient.needs(backend)
    if needed is None:
        return NONE
    return "; ".join(r for spec in needed for r in selector.static_reasons(spec, platform)) or None


def choose(op: str, platform: Platform, backend: str | None, args: Sequence[Any] | None) -> str:
    """Name the backend that runs forward and backward.

    Args:
        op: A differentiable op.
        platform: Where it is to run.
        backend: Explicit choice of the call.
        args: The call's arguments; None while a graph is traced, where sizes are symbols: what
            takes some calls only isn't chosen then, unless somebody asked for it.

    Raises:
        NoBackwardError: the chosen backend, or every one, is without backward.
        BackendUnavailableError, NoBackendError, ...: as `selector.make_plan`.
    """
    row = tuning.row_of(op, platform, args) if args is not None and backend is None else None
    scope = policy.current_scope()
    plan = selector.make_plan(op, platform, backend=backend, scope=scope, args=args, row=row)
    unusable: list[str] = []
    for spec in plan.specs:
        name = spec.backend.value
        why = lacking(op, name, platform)
        if why is not None:
            unusable += [] if why == NONE else [f"{name}: {why}"]
            continue
        loaded = selector.load(plan, spec)
        if not isinstance(loaded, kernels.Kernel):
            continue
        if plan.explicit or args is not None or loaded.supports is None:
            return name
    raise refuse(op, plan.specs[0].backend.value if plan.explicit else None, unusable)


class _Node(torch.autograd.Function):
    """One call in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, declaration: Any, backend: str, *args: Any) -> Any:
        names, gradient = list(declaration.signature.parameters), declaration.gradient
        operator = getattr(torch.ops.torch_ops, gradient.forward or declaration.name).backend
        with torch._C._AutoDispatchBelowAutograd():
            result = operator(*args, backend)
        outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        values = dict(zip(names, args, strict=True))
        values |= {f"out{index}": output for index, output in enumerate(outputs)}
        kept = [name for name in gradient.saves if values[name] is not None]
        ctx.set_materialize_grads(not gradient.sparse)
        ctx.save_for_backward(*(values[name] for name in kept))
        ctx.kept, ctx.declaration, ctx.backend = kept, declaration, backend
        ctx.rest = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
        return outputs[0] if declaration.outputs == 1 else outputs[: declaration.outputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        declaration, gradient = ctx.declaration, ctx.declaration.gradient
        saved = ctx.rest | dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        operator = getattr(torch.ops.torch_ops, gradient.op).backend
        backend = selector.as_forward(ctx.backend)

        def run(*args: Any) -> Any:
            if _grad_enabled() and _any_requires_grad(*args) and _gradient_of(gradient.op) is None:
                raise _refuse_second(declaration.name)
            return operator(*args, backend)

        found = dict(
            zip(declaration.tensor_arguments, gradient.function(run, grads, saved), strict=True)
        )
        wanted = [found.get(name) for name in declaration.signature.parameters]
        needed = ctx.needs_input_grad[2:]
        return (None, None, *(g if n else None for g, n in zip(wanted, needed, strict=True)))


def kernel(
    declaration: Any, familiar: Familiar, device_kernel: Callable[..., Any], named: bool
) -> Callable[..., Any]:
    """Build the kernel of one overload under Autograd's key of a device.

    Args:
        declaration: The op, with a `Gradient`.
        familiar: Its legal calls of late.
        device_kernel: What runs calls without gradients.
        named: Whether the last argument is the name of a backend.
    """
    apply: Callable[..., Any] = _Node.apply
    op = declaration.name
    overload = "backend" if named else "default"
    defaults = [parameter.default for parameter in declaration.signature.parameters.values()]
    count, absent, looked = familiar.tensors, familiar.absent, familiar.looks.get

    def autograd(*args: Any) -> Any:
        if not _modes() and not named and familiar.possible:
            look = looked(args[0].shape)
            if look is not None:
                same, rest, _, without_grad, alike = look
                tensors = args[:count] if len(args) >= count else args + absent[len(args) :]
                free = not (without_grad and _grad_enabled())
                if free and args[count:] == rest and same(*tensors):
                    return alike(*args)
        if _grad_enabled() and _any_requires_grad(*args):
            return train(*args)
        if not _modes() and all(map(_plain, args)):
            return device_kernel(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(getattr(torch.ops.torch_ops, op), overload)(*args)

    def train(*args: Any) -> Any:
        backend = None
        if named:
            args, backend = args[:-1], args[-1]
            registry.find(op, selector.ran_forward(backend) or backend)
        if _forward_ad._current_level >= 0 and any_tangent(args):
            raise calls.refuse_grad(op)
        args = (*args, *defaults[len(args) :])
        declaration.checker(*args)
        check_constants(declaration, args)
        return apply(declaration, _chosen(op, backend, args), *args)

    return autograd


def _chosen(op: str, backend: str | None, args: tuple[Any, ...]) -> str:
    """Choose for a call, or for the frame that is being traced, which then depends on it."""
    if backend is not None and selector.ran_forward(backend) is not None:
        return backend
    if _device_of(args).type == "meta":
        return _for_shapes(op, backend)
    platform = platform_of(args) or Platform.cpu()
    real = all(_plain(arg) for arg in args) and not _modes()
    if dynamo.tracing():
        from torch_ops import runtime

        def snapshot() -> str:
            try:
                return choose(op, platform, backend, None)
            except Exception as error:  # compared alone: the call itself raises it
                return type(error).__name__

        runtime.depend(("backward", op, platform, backend), snapshot)
    elif real:
        return _remembered(op, platform, backend, args)
    return choose(op, platform, backend, args if real else None)


def _device_of(args: tuple[Any, ...]) -> torch.device:
    return next(arg.device for arg in args if isinstance(arg, Tensor))


def _for_shapes(op: str, backend: str | None) -> str:
    """Name a backend with a backward for tensors without data, on which no kernel runs."""
    gradient = _gradient_of(op)
    names = [spec.backend.value for spec in registry.get(op)] if backend is None else [backend]
    able = [name for name in names if gradient is not None and gradient.needs(name)]
    if not able:
        raise refuse(op, backend)
    return able[0]


def _remembered(op: str, platform: Platform, backend: str | None, args: tuple[Any, ...]) -> str:
    """Choose as for a call before under the same policy: of the same look, where a table decides.

    A kernel's predicate is asked at every call; those of backends without a backward aren't.
    """
    scope = policy.current_scope()
    key = (op, backend, scope, _device_of(args))
    known = _known.get(key)
    if isinstance(known, str):
        return known
    look = None if known is None else _look(args)
    if known is not None and look in known:
        return known[look]
    made_in = policy.generation
    name = choose(op, platform, backend, args)
    row = tuning.row_of(op, platform, args) if backend is None else None
    plan = selector.make_plan(op, platform, backend=backend, scope=scope, row=row)
    if not _unasked(op, plan, name):
        return name
    by_look = not plan.explicit and tuning.decides(op, platform)
    looks = known if known is not None and len(known) < _LOOKS else {}
    found = {**looks, _look(args): name} if by_look else name
    policy.remember(_known, key, made_in, found)
    return name


def _look(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([(arg.shape, arg.dtype) if isinstance(arg, Tensor) else arg for arg in args])


def _unasked(op: str, plan: selector.Plan, name: str) -> bool:
    """Whether the backend is the first with a backward, and takes every legal call."""
    for spec in plan.specs:
        if lacking(op, spec.backend.value, plan.platform) is None:
            loaded = selector.load(plan, spec)
            taken = isinstance(loaded, kernels.Kernel) and loaded.supports is None
            return taken and spec.backend.value == name
    return False


def _plain(value: object) -> bool:
    """Whether a value is no tensor, or one that goes straight to its device's kernel."""
    if not isinstance(value, Tensor):
        return True
    if value.layout != torch.strided or value.is_quantized:
        return False
    keys = torch._C._dispatch_keys(value)
    return type(value) in _PLAIN and not any(keys.has(key) for key in _ODD_KEYS)
