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

from torch_ops import inlining, locks, policy, selector
from torch_ops.errors import TorchOpsError, listing, nearest
from torch_ops.graphs import Call, call_of, example, examples, writes
from torch_ops.platform import Platform, platform_of

__all__ = ["PASSES", "Fusion", "disable", "record", "report"]

_KEPT = 1000
_ADD = "add"
_VIEWS = ("view", "reshape", "flatten", "unflatten", "contiguous")
_lock = locks.lock()
_found: deque[Fusion] = deque(maxlen=_KEPT)
_recording: list[list[Fusion]] = []
_disabled: list[frozenset[str]] = []


@dataclass(frozen=True)
class _Pass:
    """What stands in place of what.

    Attributes:
        fused: The op that computes both, and the pass's name.
        first: The op whose first result the second one takes; ``"add"`` is PyTorch's own sum.
        second: The op of the second call.
        exact: Backends whose kernel of ``fused`` gives the bits of their other two; None is all,
            as the op's contract says.
    """

    fused: str
    first: str
    second: str
    exact: tuple[str, ...] | None = None


_PASSES = {
    found.fused: found
    for found in (
        _Pass("fused_add_rms_norm", _ADD, "rms_norm", ("torch", "inductor", "triton")),
        _Pass("fused_add_rms_norm_quant_fp8", "fused_add_rms_norm", "quantize_fp8_per_token"),
        _Pass("rms_norm_quant_fp8", "rms_norm", "quantize_fp8_per_token"),
        _Pass("silu_and_mul_quant_fp8", "silu_and_mul", "quantize_fp8_per_token"),
    )
}
PASSES = tuple(_PASSES)
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
        if name not in _PASSES:
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
            changed = [_look(node, found) for found in _PASSES.values() for node in _of(module)]
            if any(changed):
                module.graph.lint()
                module.recompile()


def _of(module: GraphModule) -> list[Node]:
    return list(module.graph.nodes)


def _look(node: Node, found: _Pass) -> bool:
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


def _producer(value: Any, found: _Pass) -> tuple[Node | None, str | None]:
    """Give the call whose first result a value is, and what view lies between, if one does."""
    between = None
    if isinstance(value, Node) and _name(value) in _VIEWS and isinstance(value.args[0], Node):
        between, value = _name(value), value.args[0]
    if not isinstance(value, Node):
        return None, None
    if found.first == _ADD:
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


def _judge(found: _Pass, first: Node, second: Call) -> tuple[str | None, str]:
    """Give the backend of the call that may stand for both; None, and why, where none may."""
    from torch_ops import runtime

    asked = [] if found.first == _ADD else [_call(first).backend]
    asked.append(second.backend)
    values, why = _arguments(found, first, second)
    if values is None:
        return None, why
    args = examples(values)
    platform = platform_of(args)
    if platform is None or not {"cpu", "cuda"} & {args[0].device.type}:
        return None, f"device {args[0].device}"
    device = args[0].device
    wanted = tuple(asked)
    runtime.depend(
        ("fusion", found.fused, wanted, device), lambda: _serving(found, platform, wanted)
    )
    backend, reason = _serving(found, platform, wanted, [*_parts(found, first, second), args])
    if backend is not None:
        runtime.depend_on_policy(found.fused, tuple(args), backend or None)
    return backend, reason


def _parts(found: _Pass, first: Node, second: Call) -> list[list[Any]]:
    parts = [] if found.first == _ADD else [examples(_call(first).values)]
    return [*parts, examples(second.values)]


def _call(node: Node) -> Call:
    call = call_of(node)
    assert call is not None
    return call


def _arguments(found: _Pass, first: Node, second: Call) -> tuple[list[Any] | None, str]:
    """Give the arguments of the fused call; None, and why, where it can't take the pair's."""
    from torch_ops.declarations import catalogue

    if found.first == _ADD:
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
        elif found.first == _ADD and not _example(first).is_contiguous():
            why = "the sum isn't contiguous, and that of the fused op is"
        else:
            try:
                declaration.check_call(*args)
            except (TypeError, ValueError) as error:
                why = str(error)
    return (values, "") if why is None else (None, why)


def _example(node: Node) -> Any:
    return example(node)


def _used_otherwise(found: _Pass, first: Node, second: Node) -> str | None:
    """Give why the fused call can't stand where the first one does, or None."""
    order = {node: place for place, node in enumerate(first.graph.nodes)}
    if found.first == _ADD:
        late = [node for node in second.all_input_nodes if order[node] > order[first]]
        if late:
            return f"{late[0].name} is made after the sum"
        between = [node for node in order if order[first] < order[node] < order[second]]
        written = next((node for node in between if writes(node)), None)
        return None if written is None else f"{written.name} writes between the two"
    results = [first]
    if found.first.startswith("fused_add"):
        results = [node for node in first.users if node.args[1] == 0]
    others = [user for result in results for user in result.users if user is not second]
    return f"{others[0].name} takes what lies between, too" if others else None


def _serving(
    found: _Pass,
    platform: Platform,
    asked: tuple[str | None, ...],
    calls: Sequence[Sequence[Any] | None] | None = None,
) -> tuple[str | None, str]:
    """Give the backend that runs both calls and serves the fused op, empty for the policy's own.

    Args:
        found: The pass.
        platform: Where they run.
        asked: The backend that each of the calls names.
        calls: Their arguments and those of the fused call; None is all calls.

    Returns:
        The backend and its name, or None and why there is none.
    """
    if any(found.fused in off for off in _disabled):
        return None, "switched off by fusion.disable"
    if len(set(asked)) > 1:
        names = " and ".join("none" if name is None else repr(name) for name in asked)
        return None, f"the calls name different backends: {names}"
    parts = [found.second] if found.first == _ADD else [found.first, found.second]
    calls = calls or [None] * (len(parts) + 1)
    try:
        chosen = [
            _backends(op, platform, args, name)
            for op, args, name in zip(parts, calls, asked, strict=False)
        ]
        own = _backends(found.fused, platform, calls[-1], asked[0])
    except TorchOpsError as error:
        return None, str(error).partition("\n")[0]
    one = set().union(*chosen)
    if len(one) > 1:
        several = "; ".join(
            f"{op} runs on {listing(sorted(names))}"
            for op, names in zip(parts, chosen, strict=True)
        )
        return None, f"not one backend: {several}"
    (backend,) = one
    if found.exact is not None and backend not in found.exact:
        return None, f"backend {backend!r} may give other bits (accepted: {listing(found.exact)})"
    return _asked_of_fused(found, platform, backend, asked[0], own)


def _asked_of_fused(
    found: _Pass, platform: Platform, backend: str, asked: str | None, own: set[str]
) -> tuple[str | None, str]:
    scope = policy.current_scope()
    if own != {backend} and policy.choose(found.fused, scope).backend is not None:
        source = policy.choose(found.fused, scope).source
        return None, f"{source} chose {listing(sorted(own))} for {found.fused}, not {backend!r}"
    try:
        selector.make_plan(found.fused, platform, backend=backend, scope=scope)
    except TorchOpsError as error:
        return None, f"backend {backend!r} of the calls: {str(error).partition(chr(10))[0]}"
    keep = asked is None and own == {backend}
    return ("" if keep else backend), f"backend {backend!r}"


def _backends(
    op: str, platform: Platform, args: Sequence[Any] | None, backend: str | None
) -> set[str]:
    """Give what a call may run on first: several where a table decides and sizes vary."""
    scope = policy.current_scope()
    plans = [
        selector.make_plan(op, platform, backend=backend, scope=scope, row=row)
        for row in inlining.rows_for(op, platform, args, backend)
    ]
    return {plan.specs[0].backend.value for plan in plans}


def _replace(found: _Pass, first: Node, second: Call, backend: str) -> None:
    values, _ = _arguments(found, first, second)
    assert values is not None
    packet, graph = getattr(torch.ops.torch_ops, found.fused), first.graph
    target, args = packet.default, tuple(values)
    if backend:
        target, args = packet.backend, (*values, backend)
    with graph.inserting_before(first):
        one = graph.call_function(target, args)
        one.meta = dict(second.node.meta)
        if found.first == _ADD:
            out, total = (graph.call_function(operator.getitem, (one, i)) for i in range(2))
    if found.first == _ADD:
        one.meta["example_value"] = (_example(second.node), _example(first))
        out.meta, total.meta = dict(second.node.meta), dict(first.meta)
        second.node.replace_all_uses_with(out)
        graph.erase_node(second.node)
        first.replace_all_uses_with(total)
        graph.erase_node(first)
        return
    second.node.replace_all_uses_with(one)
    graph.erase_node(second.node)
    if found.first.startswith("fused_add"):
        one.meta["example_value"] = (*_example(second.node), _example(first)[1])
        for user in list(first.users):
            if user.args[1] == 0:
                graph.erase_node(user)
            else:
                user.args = (one, 2)
    graph.erase_node(first)


def _note(found: _Pass, first: Node, second: Call, backend: str | None, reason: str) -> None:
    trace = str(second.node.meta.get("stack_trace", ""))
    lines = re.findall(r'File "([^<].*?)", line (\d+)', trace)
    place = ":".join(lines[-1]) if lines else ""
    calls = (first.name, second.node.name)
    noted = Fusion(found.fused, calls, backend is not None, reason, place)
    with _lock:
        for kept in (_found, *_recording):
            kept.append(noted)
