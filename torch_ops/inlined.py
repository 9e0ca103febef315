"""The operators that stand for references in compiled graphs, ``torch_ops_inlined::<op>``.

Each has the schema of its op's default overload and is composite: whatever traces a graph that
names it sees the reference's own calls, derivatives included. Graphs in PyTorch's caches name it,
so that they tell what has dissolved from what hasn't.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.library import Library

from torch_ops import batching, counting, dynamo, fusion, inductor, inlining, training
from torch_ops.declare import COMPILED, INLINED, Declaration
from torch_ops.errors import TorchOpsError
from torch_ops.graphs import BACKEND, Call, call_of, examples
from torch_ops.platform import Platform, platform_of

__all__ = ["define", "differentiates", "dissolve", "rounded"]

_log = logging.getLogger(__name__)
_NARROW = (torch.float16, torch.bfloat16)
_CLONES = ("clone", torch.clone, torch.ops.aten.clone, torch.ops.aten.clone.default)
_library = Library(INLINED, "FRAGMENT")  # kept for ever: a collected library crashes its ops
_rounding = Library(COMPILED, "FRAGMENT")
_dissolving: ContextVar[bool] = ContextVar("torch_ops_dissolving", default=False)


def define(declaration: Declaration) -> None:
    """Make the operator of an op that writes nothing."""
    name = declaration.name
    _library.define(f"{name}{declaration.schema}")

    def composite(*args: Any) -> Any:
        token = _dissolving.set(True)
        try:
            return declaration.reference(*args)
        finally:
            _dissolving.reset(token)

    def below_autocast(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return getattr(torch.ops.torch_ops_inlined, name).default(*args)

    _library.impl(name, composite, "CompositeImplicitAutograd")
    for key in ("AutocastCPU", "AutocastCUDA"):
        _library.impl(name, below_autocast, key)
    for kernel in (composite, below_autocast):
        dynamo.skip(kernel.__code__)


def batch(declaration: Declaration) -> None:
    """Give the operator of an op the batching rule of that."""
    batching.register(_library, declaration.name, declaration)


def dissolve() -> None:
    """Have the graph that is being traced, if any, name these operators where calls dissolve.

    Calls that one op computes are fused before; afterwards the graph is known to traces.
    """
    if torch.compiler.is_exporting():
        return
    lacking = dynamo.finish(fusion.fuse) or dynamo.finish(_rewrite)
    if lacking is not None:
        _log.info("no op is fused or dissolves in compiled graphs: %s", lacking)
    counting.note_graphs()


def differentiates(declaration: Declaration, args: tuple[Any, ...], backend: str | None) -> bool:
    """Whether a call is traced that dissolves, and has the derivatives of its reference then."""
    if not declaration.differentiable or not dynamo.tracing() or torch.compiler.is_exporting():
        return False
    return inlining.decide(declaration.name, args, backend).inlined


def _rewrite(graph_module: GraphModule) -> None:
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            nodes = list(module.graph.nodes)
            calls = [call for call in map(call_of, nodes) if call is not None]
            changed = [_replace(call) for call in calls]
            if any(call.declaration.mutates for call in calls):
                changed += map(_compute, nodes)
            if any(changed):
                module.recompile()


def _replace(call: Call) -> bool:
    node, op = call.node, call.declaration.name
    try:
        decided = inlining.decide(op, examples(call.values), call.backend)
        if _stays_whole(call) or not decided.inlined:
            return _pin(call)
    except TorchOpsError:  # the call raises it when it runs, in its own class
        return False
    node.target = getattr(torch.ops.torch_ops_inlined, op).default
    node.args, node.kwargs = tuple(call.values), {}
    node.meta[BACKEND] = call.backend
    return True


def _compute(node: Node) -> bool:
    """Make a clone a product with 1, in a graph with a call that writes.

    Inductor may take the clone for its source, and the call writes that (pytorch#198031).
    """
    if node.target not in _CLONES or len(node.args) != 1 or node.kwargs:
        return False
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    node.op, node.target, node.args = "call_function", torch.mul, (node.args[0], 1)
    return True


def _pin(call: Call) -> bool:
    """Name the backend of a call that autograd differentiates: backward runs on it, too.

    PyTorch's caches know a graph, and the backward that was made of it, by what the graph names.
    """
    if call.declaration.gradient is None or call.backend is not None:
        return False
    node, op = call.node, call.declaration.name
    if not _wants_grad(node):
        return False
    platform = platform_of(examples(call.values)) or Platform.cpu()
    backend = training.choose(op, platform, None, None)
    node.target = getattr(torch.ops.torch_ops, op).backend
    node.args, node.kwargs = (*call.values, backend), {}
    return True


def _stays_whole(call: Call) -> bool:
    gradient = call.declaration.gradient
    return gradient is not None and gradient.whole and _wants_grad(call.node)


def _wants_grad(node: Node) -> bool:
    """Whether autograd differentiates a call."""
    (found,) = examples([node])
    first = found if isinstance(found, Tensor) else found[0]
    return bool(first.requires_grad)


def rounded(x: Tensor) -> Tensor:
    """Keep that x is rounded to its dtype where the reference that calls this dissolves.

    Fused code would go on with the float32 value that it rounds for memory alone. Elsewhere x is
    what it is.
    """
    if torch.compiler.is_dynamo_compiling() or not _dissolving.get() or x.dtype not in _NARROW:
        return x
    result: Tensor = torch.ops.torch_ops_compiled.rounded(x)
    return result


def _round(x: Tensor) -> Tensor:
    return x.clone()


def _fake(x: Tensor) -> Tensor:
    inductor.lower_rounding(torch.ops.torch_ops_compiled.rounded.default)
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad


def _define_rounding() -> None:
    _rounding.define("rounded(Tensor x) -> Tensor")
    for key in ("CPU", "CUDA"):
        _rounding.impl("rounded", _round, key)
    dynamo.skip(_round.__code__)
    torch.library.register_fake(f"{COMPILED}::rounded", _fake, lib=_rounding)
    torch.library.register_autograd(f"{COMPILED}::rounded", _backward, lib=_rounding)


_define_rounding()
