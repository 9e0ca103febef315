"""Calls of ops in the graphs that Dynamo makes, before anything is done to them."""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from torch_ops.declare import Declaration, declared

__all__ = [
    "BACKEND",
    "FUSED",
    "Call",
    "call_of",
    "changes_state",
    "example",
    "examples",
    "is_ours",
    "writes",
]

BACKEND, FUSED = "torch_ops_backend", "torch_ops_fused"
"""What our changes leave in the meta of a node: the backend that a call named before it dissolved,
and the pairs, with their pass, that it stands for."""
_IN_PLACE = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor,
    operator.ilshift, operator.irshift, operator.imatmul,
}  # fmt: skip
_METHODS = {f"__{function.__name__}__" for function in _IN_PLACE}
_STATEFUL = ("batch_norm", "instance_norm", "rrelu", "embedding_renorm")
"""Parts of the names of PyTorch's builtins that write what their schemas don't say."""
_WRITTEN = ("running_mean", "running_var", "max_norm")
"""Arguments of PyTorch's functions that are written, or have another one written, if given."""
_STATES = {
    "_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode", "_enter_autocast",
    "_exit_autocast",
}  # fmt: skip


class Call(NamedTuple):
    """A node that calls an op.

    Attributes:
        node: The node.
        declaration: The op.
        values: Its arguments by position, defaults too.
        backend: The backend that it names, if it does.
    """

    node: Node
    declaration: Declaration
    values: list[Any]
    backend: str | None


def is_ours(node: Node) -> bool:
    """Whether a node calls an op of ours or a layer of attention, which take any strides."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "torch_ops"
    name = target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else ""
    return name.startswith("torch_ops::")


def call_of(node: Node) -> Call | None:
    """Give what a node calls, None where that isn't one of our ops."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name, named = target._schema.name, target._overloadname == "backend"
    elif isinstance(target, torch._ops.OpOverloadPacket):
        name, named = target._qualified_op_name, "backend" in node.kwargs
    else:
        return None
    namespace, _, op = name.partition("::")
    declaration = declared.get(op) if namespace == "torch_ops" else None
    if declaration is None:
        return None
    parameters = list(declaration.signature.parameters.values())
    named = named or len(node.args) > len(parameters)
    values = list(node.args)
    values += [node.kwargs.get(p.name, p.default) for p in parameters[len(values) :]]
    if named and len(values) == len(parameters):
        values.append(node.kwargs["backend"])
    backend = str(values.pop()) if named else None
    return Call(node, declaration, values, backend)


def example(node: Node) -> Any:
    """Give the fake result of a node."""
    return node.meta["example_value"]


def examples(values: Sequence[Any]) -> list[Any]:
    """Give arguments with the fake results of nodes in their places."""
    return [torch.fx.node.map_arg(value, example) for value in values]


def writes(node: Node) -> bool:
    """Whether a node may write a tensor that it is given."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(schema.is_mutable for schema in target._schemas.values())
    if node.op == "call_method" or isinstance(target, str):
        name = str(target)
        return name in _METHODS or (name.endswith("_") and not name.endswith("__"))
    if node.op != "call_function":
        return node.op == "call_module"
    name = str(getattr(target, "__name__", ""))
    if isinstance(target, torch._ops.HigherOrderOperator) or target in _IN_PLACE:
        return True
    return "out" in node.kwargs or name.endswith("_") or _writes_when_asked(node, name)


def _writes_when_asked(node: Node, name: str) -> bool:
    """Whether a function writes because of an argument: ``inplace``, or running statistics."""
    if not isinstance(node.target, types.FunctionType):
        return any(part in name for part in _STATEFUL)
    if not node.target.__module__.startswith("torch."):
        return True
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return True
    bound.apply_defaults()
    given = bound.arguments
    return bool(given.get("inplace")) or any(given.get(n) is not None for n in _WRITTEN)


def changes_state(node: Node) -> bool:
    """Whether a node changes what nodes after it depend on: grad mode, inference mode, autocast."""
    return getattr(node.target, "__name__", "") in _STATES
