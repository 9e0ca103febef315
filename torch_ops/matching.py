"""Pairs of calls that one op computes, in a graph of Dynamo's: found, and replaced."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torch_ops.declare import Declaration
from torch_ops.graphs import Call, call_of, example, examples, writes
from torch_ops.pairs import ADD, PASSES, Pass

__all__ = ["Pair", "pairs_in"]

_VIEWS = ("view", "reshape", "flatten", "unflatten", "contiguous")
_BY_CALLS = {(found.first, found.second): found for found in PASSES.values()}


@dataclass(frozen=True)
class Pair:
    """Two calls that one op computes.

    Attributes:
        found: The pass.
        node: What the first call gives.
        first: The first call, None where that is PyTorch's own sum.
        second: The second call.
        between: The view of the result that the second one takes, if it does.
    """

    found: Pass
    node: Node
    first: Call | None
    second: Call
    between: str | None

    @property
    def calls(self) -> list[Call]:
        """Those of the two that are ops of ours."""
        return [call for call in (self.first, self.second) if call is not None]

    def arguments(self) -> tuple[list[Any], str | None]:
        """Give the arguments of the fused call, and why it can't take the place of the pair."""
        from torch_ops.declarations import catalogue

        if self.found.unserved:
            return [], self.found.unserved
        if self.between is not None:
            return [], f"{self.between!r} lies between"
        declaration = catalogue()[self.found.fused]
        if self.first is not None:
            first = _named(self.first)
        else:
            first = dict(zip(("x", "residual"), self.node.args, strict=True))
        named = _named(self.second) | first
        values = [named[name] for name in declaration.signature.parameters]
        return values, self._bound() or self._unfit(declaration, values)

    def _bound(self) -> str | None:
        """Give why the fused call can't stand where the first one does, or None."""
        first, second = self.node, self.second.node
        if self.first is not None:
            parts = _parts(first)
            takers = [user for user in first.users if user not in parts]
            takers += [user for part in parts if part.args[1] == 0 for user in part.users]
            others = [user for user in takers if user is not second]
            if others:
                return f"{others[0].name} takes what lies between, too"
        order = {node: place for place, node in enumerate(first.graph.nodes)}
        others = [node for node in second.all_input_nodes if node is not self.second.values[0]]
        late = [node for node in others if order[node] > order[first]]
        what = "the sum" if self.first is None else first.name
        if late:
            return f"{late[0].name} is made after {what}"
        if self.first is not None and not others:
            return None
        between = [node for node in order if order[first] < order[node] < order[second]]
        written = next((node for node in between if writes(node)), None)
        return None if written is None else f"{written.name} writes between the two"

    def _unfit(self, declaration: Declaration, values: list[Any]) -> str | None:
        """Give why the fused op doesn't take these arguments, or None."""
        for parameter, value in zip(declaration.signature.parameters.values(), values, strict=True):
            if value is None and parameter.annotation is Tensor:
                why = f"{parameter.name} is None, which {self.found.fused} doesn't take"
                return f"{why}: {self.found.absent}" if self.found.absent else why
        args = examples(values)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return "an input requires grad"
        if self.first is None and not example(self.node).is_contiguous():
            return "the sum isn't contiguous, and that of the fused op is"
        try:
            declaration.check_call(*args)
        except (TypeError, ValueError) as error:
            return str(error)
        return None

    def replace(self, values: list[Any], backend: str) -> None:
        """Put the fused call there, by a backend; empty for the policy's own."""
        packet, graph = getattr(torch.ops.torch_ops, self.found.fused), self.node.graph
        target, args = packet.default, tuple(values)
        if backend:
            target, args = packet.backend, (*values, backend)
        with graph.inserting_before(self.node):
            one = graph.call_function(target, args)
        one.meta = dict(self.second.node.meta)
        if self.first is None:
            self._with_sum(graph, one)
            return
        self.second.node.replace_all_uses_with(one)
        graph.erase_node(self.second.node)
        rest = [part for part in _parts(self.node) if part.args[1] != 0]
        if not isinstance(example(self.node), Tensor):
            one.meta["example_value"] = (*example(one), *example(self.node)[1:])
        for part in _parts(self.node):
            if part in rest:  # behind codes and scale
                part.args = (one, part.args[1] + 1)
            else:
                graph.erase_node(part)
        graph.erase_node(self.node)

    def _with_sum(self, graph: Graph, one: Node) -> None:
        """Take the norm and the sum from the fused call."""
        one.meta["example_value"] = (example(self.second.node), example(self.node))
        with graph.inserting_after(one):
            total = graph.call_function(operator.getitem, (one, 1))
            out = graph.call_function(operator.getitem, (one, 0))
        for old, new in ((self.second.node, out), (self.node, total)):
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
            graph.erase_node(old)


def pairs_in(graph: Graph) -> Iterator[Pair]:
    """Find the pairs that a pass knows, those of calls that have just been fused, too."""
    for node in list(graph.nodes):
        second = call_of(node)
        pair = None if second is None else _pair(second)
        if pair is not None:
            yield pair


def _pair(second: Call) -> Pair | None:
    value, between, result = second.values[0] if second.values else None, None, 0
    if isinstance(value, Node) and _name(value) in _VIEWS and isinstance(value.args[0], Node):
        between, value = _name(value), value.args[0]
    if not isinstance(value, Node):
        return None
    if value.target is operator.getitem and value in _parts(value.args[0]):
        value, result = value.args
    first = call_of(value)
    name = ADD if _is_sum(value) else None if first is None else first.declaration.name
    found = _BY_CALLS.get((str(name), second.declaration.name))
    if found is None or found.result != result:
        return None
    return Pair(found, value, first, second, between)


def _parts(node: Any) -> list[Node]:
    """Give where single results of a call that has several are taken."""
    if not isinstance(node, Node) or isinstance(node.meta.get("example_value"), Tensor):
        return []
    return [user for user in node.users if user.target is operator.getitem]


def _named(call: Call) -> dict[str, Any]:
    return dict(zip(call.declaration.signature.parameters, call.values, strict=True))


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
