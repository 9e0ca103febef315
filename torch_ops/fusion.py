"""Pairs of calls that one op computes: found in compiled graphs, fused, and reported.

A pass is named as the op that it puts in the place of two. It changes no bits, and no backend: what
the two calls run on has to serve the op too. Where it doesn't fuse a pair, `report` says why.
"""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torch_ops import locks, pairs, policy
from torch_ops.errors import listing, nearest
from torch_ops.graphs import FUSED, Call, call_of, example, examples, writes
from torch_ops.pairs import ADD, Pass
from torch_ops.platform import Platform, platform_of

__all__ = ["PASSES", "Fusion", "disable", "record", "report"]

_KEPT = 1000
_VIEWS = ("view", "reshape", "flatten", "unflatten", "contiguous")
_lock = locks.lock()
_found: deque[Fusion] = deque(maxlen=_KEPT)
_recording: list[list[Fusion]] = []
_disabled: list[frozenset[str]] = []


PASSES = tuple(pairs.PASSES)
"""Names of all passes, in the order in which they look at a graph."""


@dataclass(frozen=True)
class Fusion:
    """A pair of calls in a graph.

    Attributes:
        name: The pass.
        calls: Names of the two calls in the graph.
        fused: Whether one call stands in their place.
        reason: Why not, or the backend that both ran on.
        place: ``file:line`` of the second call, empty where it isn't known.
    """

    name: str
    calls: tuple[str, str]
    fused: bool
    reason: str
    place: str

    def __str__(self) -> str:
        verdict = "fused" if self.fused else "not fused"
        where = f" at {self.place}" if self.place else ""
        return f"{self.name}: {' + '.join(self.calls)}{where}: {verdict}: {self.reason}"


def report() -> list[Fusion]:
    """List the pairs of the graphs that this process has compiled, the last thousand."""
    with _lock:
        return list(_found)


@contextmanager
def record() -> Iterator[list[Fusion]]:
    """Collect the pairs of the graphs that are compiled in a ``with`` block, by all threads."""
    mine: list[Fusion] = []
    with _lock:
        _recording.append(mine)
    try:
        yield mine
    finally:
        with _lock:
            _recording[:] = [held for held in _recording if held is not mine]


def disable(*passes: str) -> Callable[[], None]:
    """Switch passes off in the whole process; graphs that are compiled already follow.

    Args:
        *passes: Names out of `PASSES`; all of them where none is given.

    Returns:
        A function that takes this call back and no other, in any order.

    Raises:
        ValueError: there is no such pass.
        TorchOpsError: compiled code lives that can't follow.
    """
    policy.refuse_in_traced_code("fusion.disable")
    for name in passes:
        if name not in pairs.PASSES:
            raise ValueError(
                f"fusion.disable: no pass {name!r}. Known: {listing(PASSES)}."
                f"{nearest(name, PASSES)}"
            )
    off = frozenset(passes or PASSES)
    policy.change(lambda: _disabled.append(off))

    def undo() -> None:
        if any(held is off for held in _disabled):
            policy.change(lambda: _disabled.remove(off))

    return undo


def fuse(graph_module: GraphModule) -> None:
    """Put one call in the place of every pair that a pass knows, in a graph of Dynamo's."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            changed = [
                _look(node, found)
                for found in pairs.PASSES.values()
                for node in list(module.graph.nodes)
            ]
            if any(changed):
                module.graph.lint()
                module.recompile()


def _look(node: Node, found: Pass) -> bool:
    second = call_of(node)
    if second is None or second.declaration.name != found.second:
        return False
    first, between = _producer(second.values[0], found)
    if first is None:
        return False
    if between is not None:
        backend, reason = None, f"{between!r} lies between"
    else:
        backend, reason = _judge(found, first, second)
    if backend is not None:
        _replace(found, first, second, backend)
    _note(found, first, second, backend, reason)
    return backend is not None


def _producer(value: Any, found: Pass) -> tuple[Node | None, str | None]:
    """Give the call whose first result a value is, and what view lies between, if one does."""
    between = None
    if isinstance(value, Node) and _name(value) in _VIEWS and isinstance(value.args[0], Node):
        between, value = _name(value), value.args[0]
    if not isinstance(value, Node):
        return None, None
    if found.first == ADD:
        return (value if _is_sum(value) else None), between
    if value.target is operator.getitem and value.args[1] == 0:
        value = value.args[0]
    call = call_of(value) if isinstance(value, Node) else None
    matches = call is not None and call.declaration.name == found.first
    return (value if matches else None), between


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _is_sum(node: Node) -> bool:
    named = node.target in (operator.add, torch.add) or (node.op, node.target) == (
        "call_method",
        "add",
    )
    tensors = [value for value in node.args if isinstance(value, Node)]
    return named and len(tensors) == 2 and not node.kwargs and all(map(_is_tensor, tensors))


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


def _judge(found: Pass, first: Node, second: Call) -> tuple[str | None, str]:
    """Give the backend of the call that may stand for both; None, and why, where none may."""
    from torch_ops import runtime

    asked = [] if found.first == ADD else [_call(first).backend]
    asked.append(second.backend)
    values, why = _arguments(found, first, second)
    if values is None:
        return None, why
    args = examples(values)
    platform = platform_of(args)
    device = args[0].device
    if platform is None or device.type not in ("cpu", "cuda"):
        return None, f"device {device} has no kernels"
    wanted = tuple(asked)
    runtime.depend(
        ("fusion", found.fused, wanted, device), lambda: _serving(found, platform, wanted)
    )
    backend, reason = _serving(found, platform, wanted, [*_parts(found, first, second), args])
    if backend is not None:
        runtime.depend_on_policy(found.fused, tuple(args), backend or None)
    return backend, reason


def _parts(found: Pass, first: Node, second: Call) -> list[list[Any]]:
    parts = [] if found.first == ADD else [examples(_call(first).values)]
    return [*parts, examples(second.values)]


def _call(node: Node) -> Call:
    call = call_of(node)
    assert call is not None
    return call


def _arguments(found: Pass, first: Node, second: Call) -> tuple[list[Any] | None, str]:
    """Give the arguments of the fused call; None, and why, where it can't take the pair's."""
    from torch_ops.declarations import catalogue

    if found.first == ADD:
        values = [*first.args[:2], *second.values[1:]]
    else:
        values = list(_call(first).values)
    why = _used_otherwise(found, first, second.node)
    declaration = catalogue()[found.fused]
    for parameter, value in zip(declaration.signature.parameters.values(), values, strict=True):
        if value is None and parameter.annotation is Tensor:
            why = why or f"{parameter.name} is None, which {found.fused} doesn't take"
    if why is None:
        args = examples(values)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            why = "an input requires grad"
        elif found.first == ADD and not example(first).is_contiguous():
            why = "the sum isn't contiguous, and that of the fused op is"
        else:
            try:
                declaration.check_call(*args)
            except (TypeError, ValueError) as error:
                why = str(error)
    return (values, "") if why is None else (None, why)


def _used_otherwise(found: Pass, first: Node, second: Node) -> str | None:
    """Give why the fused call can't stand where the first one does, or None."""
    order = {node: place for place, node in enumerate(first.graph.nodes)}
    if found.first == ADD:
        late = [node for node in second.all_input_nodes if order[node] > order[first]]
        if late:
            return f"{late[0].name} is made after the sum"
        between = [node for node in order if order[first] < order[node] < order[second]]
        written = next((node for node in between if writes(node)), None)
        return None if written is None else f"{written.name} writes between the two"
    takers = list(first.users)
    if found.first.startswith("fused_add"):
        parts = [user for user in first.users if user.target is operator.getitem]
        takers = [user for user in first.users if user not in parts]
        takers += [user for part in parts if part.args[1] == 0 for user in part.users]
    others = [user for user in takers if user is not second]
    return f"{others[0].name} takes what lies between, too" if others else None


def _serving(
    found: Pass,
    platform: Platform,
    asked: tuple[str | None, ...],
    calls: Sequence[Sequence[Any] | None] | None = None,
) -> tuple[str | None, str]:
    if any(found.fused in off for off in _disabled):
        return None, "switched off by fusion.disable"
    return pairs.serving(found, platform, asked, calls)


def _replace(found: Pass, first: Node, second: Call, backend: str) -> None:
    values, _ = _arguments(found, first, second)
    assert values is not None
    packet, graph = getattr(torch.ops.torch_ops, found.fused), first.graph
    target, args = packet.default, tuple(values)
    if backend:
        target, args = packet.backend, (*values, backend)
    with graph.inserting_before(first):
        one = graph.call_function(target, args)
        one.meta = dict(second.node.meta)
        one.meta[FUSED] = (*first.meta.get(FUSED, ()), (found.fused, (found.first, found.second)))
        if found.first == ADD:
            out, total = (graph.call_function(operator.getitem, (one, i)) for i in range(2))
    if found.first == ADD:
        one.meta["example_value"] = (example(second.node), example(first))
        out.meta, total.meta = dict(second.node.meta), dict(first.meta)
        second.node.replace_all_uses_with(out)
        graph.erase_node(second.node)
        first.replace_all_uses_with(total)
        graph.erase_node(first)
        return
    second.node.replace_all_uses_with(one)
    graph.erase_node(second.node)
    if found.first.startswith("fused_add"):
        one.meta["example_value"] = (*example(second.node), example(first)[1])
        for user in list(first.users):
            if user.args[1] == 0:
                graph.erase_node(user)
            else:
                user.args = (one, 2)
    graph.erase_node(first)


def _note(found: Pass, first: Node, second: Call, backend: str | None, reason: str) -> None:
    trace = str(second.node.meta.get("stack_trace", ""))
    lines = re.findall(r'File "([^<].*?)", line (\d+)', trace)
    place = ":".join(lines[-1]) if lines else ""
    calls = (first.name, second.node.name)
    noted = Fusion(found.fused, calls, backend is not None, reason, place)
    with _lock:
        for kept in (_found, *_recording):
            kept.append(noted)
