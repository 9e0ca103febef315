"""`op`: turns one typed torch function into an operator. It knows declarations, not kernels."""

from __future__ import annotations

import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from torch_ops import inductor, policy
from torch_ops import schema as schemas
from torch_ops.batching import Rows
from torch_ops.contracts import PROMISES, Contract
from torch_ops.errors import DeclarationError

if TYPE_CHECKING:
    from torch_ops.training import Gradient

__all__ = ["COMPILED", "DEFAULT_ORDER", "FLOATS", "INLINED", "Declaration", "op"]

COMPILED = "torch_ops_compiled"
"""Namespace of the operators that compiled graphs call: graphs in PyTorch's caches name it."""
INLINED = "torch_ops_inlined"
"""Namespace of the operators that dissolve in compiled graphs."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DEFAULT_ORDER: Mapping[str, tuple[str, ...]] = {
    "cpu": ("torch", "inductor"),
    "cuda": ("triton", "flashinfer", "sgl_kernel", "torch", "inductor"),
    "rocm": ("aiter", "triton", "torch", "inductor"),
}
"""Order of backends by platform, where an op declares no other."""

declared: dict[str, Declaration] = {}


class Declaration:
    """A logical op: schema, reference, fake, checks, contract and documentation.

    Attributes:
        name: ``snake_case``; the operator is ``torch.ops.torch_ops.<name>``.
        reference: The declared function itself, plain traceable PyTorch.
        signature: Its signature with resolved types.
        schema: Its operator schema, without the name.
        contract: What every backend promises.
        dtypes: Legal floating dtypes.
        mutates: Names of the arguments that it writes.
        order: Preferred backends by platform (``"cpu"``, ``"cuda"``, ``"rocm"``).
        site: ``file:line`` of the declaration.
        differentiable: Whether it has derivatives.
        gradient: How backends differentiate it; None where none does.
        rows: Which arguments vmap batches in one call; None where it calls the op for each.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        contract: Contract,
        dtypes: tuple[torch.dtype, ...],
        mutates: tuple[str, ...],
        order: Mapping[str, tuple[str, ...]],
        signature: inspect.Signature,
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.contract = contract
        self.dtypes = dtypes
        self.mutates = mutates
        self.order = {**DEFAULT_ORDER, **order}
        self.signature = signature
        self.schema = schemas.infer(self.name, signature, mutates)
        if self.name in PROMISES:
            raise DeclarationError(
                f"op {self.name!r}: that is a promise, as in use_backend({self.name}=True) "
                "(accepted: any other name)"
            )
        if bool(mutates) == bool(self.outputs):
            raise DeclarationError(
                f"op {self.name!r}: it returns {'tensors' if mutates else 'nothing'} and mutates "
                f"{list(mutates) or 'nothing'} (accepted: an op either returns tensors or writes "
                "arguments and returns nothing)"
            )
        code = reference.__code__
        self.site = f"{code.co_filename}:{code.co_firstlineno}"
        self.checker: Callable[..., None] = _every_call_is_legal
        self.memory_checker: Callable[..., None] = _every_call_is_legal
        self.debug_checker: Callable[..., None] | None = None
        self.faker: Callable[..., Any] = self._fake_by_reference
        self.differentiable = False
        self.gradient: Gradient | None = None
        self.rows: Rows | None = None

    @property
    def doc(self) -> str:
        """The declared function's docstring."""
        return inspect.cleandoc(self.reference.__doc__ or "")

    @property
    def outputs(self) -> int:
        """How many tensors the op returns."""
        return self.schema.partition(" -> ")[2].count("Tensor")

    @property
    def tensor_arguments(self) -> tuple[str, ...]:
        """Names of the arguments that are tensors, optional ones too."""
        return tuple(
            name
            for name, parameter in self.signature.parameters.items()
            if parameter.annotation is Tensor or parameter.annotation == Tensor | None
        )

    def check(self, function: Callable[..., None]) -> Callable[..., None]:
        """Set the argument checks, run in the kernel and the fake of every backend.

        They may look at types, dtypes, devices, shapes, strides and numbers, as the guards of
        compiled code do: a compiled graph, and an eager call that looks like one before in all of
        these, aren't checked again. Where tensors lie in memory is for `memory_check`.
        """
        self.checker = self._same_parameters(function, "check")
        policy.invalidate()  # calls that look like one that was legal before aren't checked
        return function

    def memory_check(self, function: Callable[..., None]) -> Callable[..., None]:
        """Set the check that what the op writes shares no memory, run at every call.

        Raises:
            DeclarationError: the op writes none of its arguments.
        """
        if not self.mutates:
            raise DeclarationError(
                f"op {self.name!r}: a memory check is for ops that write arguments, and this one "
                "mutates nothing"
            )
        self.memory_checker = self._same_parameters(function, "memory_check")
        return function

    def check_call(self, *args: Any) -> None:
        """Raise what the checks say of these arguments, those of memory too."""
        self.checker(*args)
        self.memory_checker(*args)

    def debug_check(self, function: Callable[..., None]) -> Callable[..., None]:
        """Set the checks that read data and synchronize, run in ``debug()`` alone."""
        self.debug_checker = self._same_parameters(function, "debug_check")
        return function

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the fake kernel: contiguous empties of the outputs' shapes and dtypes."""
        self.faker = self._same_parameters(function, "fake")
        policy.invalidate()  # the fake is a part of the registry's fingerprint
        return function

    def backward(
        self,
        op: str,
        *,
        saves: tuple[str, ...],
        constants: tuple[str, ...] = (),
        forward: Declaration | None = None,
        sparse: bool = False,
        whole: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Set how gradients come about: by another op, on the backend that ran forward.

        The decorated function takes ``run``, which calls that op, the gradients of the outputs and
        what was saved, by name; it gives a gradient or None for each tensor argument.

        Args:
            op: The op that computes them; its backends are those with a backward.
            saves: Arguments by name, and outputs as ``out0``, that are kept for it.
            constants: Tensor arguments that have no gradient. A call in which one of them
                requires grad is refused.
            forward: An op that runs in this one's place where gradients are wanted, by the same
                backend: it has the same parameters and, after the same outputs, more to be saved.
            sparse: Give None for outputs without a gradient, instead of zeros.
            whole: Keep calls with gradients as they are in compiled graphs: where the reference
                would dissolve, its own derivatives would keep more.

        Raises:
            DeclarationError: the op writes its arguments, or saves what it doesn't have.
        """
        runs = forward or self
        known = [*self.tensor_arguments, *(f"out{i}" for i in range(runs.outputs))]
        unknown = [name for name in saves if name not in known]
        if self.mutates or unknown:
            raise DeclarationError(
                f"op {self.name!r}: a backward that saves {list(saves)} (accepted: of an op that "
                f"mutates nothing, tensors among {known})"
            )
        if [*runs.signature.parameters] != [*self.signature.parameters]:
            raise DeclarationError(
                f"op {self.name!r}: a backward whose forward is {runs.name}{runs.schema} "
                f"(accepted: an op with the parameters of {self.name}{self.schema})"
            )
        unknown = [name for name in constants if name not in self.tensor_arguments]
        if unknown:
            raise DeclarationError(
                f"op {self.name!r}: a backward with the constants {list(constants)} (accepted: "
                f"tensor arguments, among {list(self.tensor_arguments)})"
            )

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            from torch_ops import runtime
            from torch_ops.training import Gradient

            run_by = None if forward is None else forward.name
            self.gradient = Gradient(op, saves, function, constants, run_by, sparse, whole)
            self.differentiable = True
            runtime.differentiate(self)
            policy.invalidate()
            return function

        return declare

    def batch(self, *names: str, merge: bool = False) -> None:
        """Set what `torch.vmap` batches in one call.

        Args:
            *names: Tensor arguments whose first axis stands for rows, each computed alone.
            merge: The op takes one such axis and no more: that of the batch joins it.

        Raises:
            DeclarationError: there is no such tensor argument, or one that is written isn't named.
        """
        unknown = [name for name in names if name not in self.tensor_arguments]
        forgotten = [name for name in self.mutates if name not in names]
        if unknown or forgotten or not names:
            raise DeclarationError(
                f"op {self.name!r}: batch{names} (accepted: names out of "
                f"{list(self.tensor_arguments)}, of what is written all: {list(self.mutates)})"
            )
        from torch_ops import runtime

        self.rows = Rows(names, merge)
        runtime.batch(self)

    def _same_parameters(self, function: Callable[..., Any], role: str) -> Callable[..., Any]:
        got = [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
        want = [(p.name, p.default) for p in self.signature.parameters.values()]
        if got != want:
            code = function.__code__
            raise DeclarationError(
                f"op {self.name!r}: the {role}'s signature differs from the declaration. "
                f"Declared: {self.name}{inspect.signature(self.reference)} at {self.site}. "
                f"Received: {role}{inspect.signature(function)} "
                f"at {code.co_filename}:{code.co_firstlineno}."
            )
        return function

    def _fake_by_reference(self, *args: Any) -> Any:
        result = self.reference(*args)
        if self.mutates:
            return None
        if isinstance(result, Tensor):
            return result.new_empty(result.shape)
        return tuple(output.new_empty(output.shape) for output in result)

    def digest(self) -> str:
        """Digest of schema, contract, reference and fake, and of the functions that these call."""
        parts = [COMPILED, self.name, self.schema, repr(self.contract), repr(self.mutates)]
        functions = [self.reference, self.faker]
        if self.gradient is not None:
            fields = self.gradient._asdict()
            functions.append(fields.pop("function"))
            parts.append(repr(fields))
        for function in functions:
            if isinstance(function, types.FunctionType):
                parts += _describe_all(function, set())
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"Declaration({self.name}{self.schema})"


def _every_call_is_legal(*args: Any) -> None:
    """Check nothing: what an op without checks of its own does."""


def _describe(code: types.CodeType) -> str:
    """Describe what a code object does, alike in every process: no addresses, no set order."""
    parts = [code.co_code.hex(), repr(code.co_names), repr(code.co_varnames)]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            parts.append(_describe(constant))
        elif isinstance(constant, frozenset):
            parts.append(repr(sorted(map(repr, constant))))
        else:
            parts.append(repr(constant))
    return "|".join(parts)


def _describe_all(function: types.FunctionType, seen: set[object]) -> list[str]:
    """Describe a function and those of its own package that it calls by name."""
    if function in seen:
        return []
    seen.add(function)
    names, package = _names(function.__code__), _package(function)
    found = [function.__globals__.get(name) for name in names]
    modules = [value for value in found if isinstance(value, types.ModuleType)]
    found += [vars(module).get(name) for module in modules for name in names]
    parts = [_describe(function.__code__), repr(function.__defaults__)]
    for value in found:
        if isinstance(value, types.FunctionType) and _package(value) == package:
            parts += _describe_all(value, seen)
    return parts


def _package(function: types.FunctionType) -> str:
    return function.__module__.partition(".")[0]


def _names(code: types.CodeType) -> list[str]:
    """Names that a code object and those inside of it look up, each once, in order."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(n for c in inner for n in _names(c))]))


def declarations_digest() -> str:
    """Digest of all declarations, whatever the order they came in."""
    lowered = _describe_all(cast(types.FunctionType, inductor.lower_rounding), set())
    return "".join([*lowered, *(declared[name].digest() for name in sorted(declared))])


def op(
    *,
    contract: Contract,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    mutates: tuple[str, ...] = (),
    order: Mapping[str, tuple[str, ...]] | None = None,
) -> Callable[[Callable[..., Any]], Declaration]:
    """Declare the decorated function as the op ``torch.ops.torch_ops.<its name>``.

    The function is schema, reference, default fake and documentation at once. The same
    declaration twice is a no-op.

    Args:
        contract: What every backend promises.
        dtypes: Legal floating dtypes of the inputs.
        mutates: Names of the arguments that are written; the op then returns nothing.
        order: Preferred backends by platform, over `DEFAULT_ORDER`.

    Raises:
        DeclarationError: the name is declared otherwise already (the first one stays), or a
            type has no place in a schema.
    """
    local_names = dict(sys._getframe(1).f_locals)

    def declare(function: Callable[..., Any]) -> Declaration:
        from torch_ops import discovery, runtime

        signature = schemas.resolve_annotations(function, local_names)
        declaration = Declaration(function, contract, dtypes, mutates, order or {}, signature)
        first = declared.get(declaration.name)
        if first is not None:
            return _same_or_refuse(first, declaration)
        runtime.register(declaration)
        declared[declaration.name] = declaration
        policy.invalidate()
        discovery.serve(declaration.name)
        return declaration

    return declare


def _same_or_refuse(first: Declaration, second: Declaration) -> Declaration:
    fields = ("schema", "contract", "dtypes", "mutates", "order")
    differs = [
        f"{field}: {getattr(first, field)!r} != {getattr(second, field)!r}"
        for field in fields
        if getattr(first, field) != getattr(second, field)
    ]
    codes = [declaration.reference.__code__ for declaration in (first, second)]
    if _describe(codes[0]) != _describe(codes[1]):
        differs.append("reference: other code")
    if differs:
        raise DeclarationError(
            f"op {first.name!r} is declared differently: {'; '.join(differs)}. "
            f"Declared at {first.site}, rejected at {second.site}. The first one stays."
        )
    return first
