"""Pairs of calls that one op computes, in a graph of Dynamo's: found, and replaced."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torch_ops import dynamo, reuse
from torch_ops.declare import Declaration
from torch_ops.graphs import (
    FUSED,
    Call,
    call_of,
    changes_state,
    example,
    examples,
    is_ours,
    writes,
)
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

    @property
    def writes(self) -> bool:
        """Whether the second call writes its arguments, as the one for both does then."""
        return bool(self.second.declaration.mutates)

    def arguments(self) -> tuple[list[Any], str | None]:
        """Give the arguments of the fused call, and why it can't take the place of the pair."""
        from torch_ops.declarations import catalogue

        if self.between is not None:
            return [], f"{self.between!r} lies between"
        declaration = catalogue()[self.found.fused]
        summands = zip(("x", "residual"), self.node.args, strict=True)
        named = _named(self.second) | (_named(self.first) if self.first else dict(summands))
        values = [named[name] for name in declaration.signature.parameters]
        unfit = self._bound() or self._unwritable(declaration, named)
        return values, unfit or self._unfit(declaration, values)

    def _bound(self) -> str | None:
        """Give why no call can stand for both, or None."""
        first, second = self.node, self.second.node
        taken, kept = self._users()
        if taken:
            return f"{taken[0].name} takes what lies between, too"
        if any(value is self.second.values[0] for value in self.second.values[1:]):
            return f"{second.name} takes what lies between twice"
        others = [node for node in second.all_input_nodes if node is not self.second.values[0]]
        order = {node: place for place, node in enumerate(first.graph.nodes)}
        between = [node for node in order if order[first] < order[node] < order[second]]
        changed = next((node for node in between if changes_state(node)), None)
        if changed is not None:
            return f"{changed.name} lies between the two"
        if self.first is not None and not others:
            return None
        early = [node for node in kept if order[node] < order[second]]
        late = self._late()
        if late and early:
            return f"{late[0].name} is made after {early[0].name} takes what {first.name} gives"
        written = next((node for node in between if writes(node)), None)
        return None if written is None else f"{written.name} writes between the two"

    def _users(self) -> tuple[list[Node], list[Node]]:
        """Give who else takes what lies between and won't be there, and what will be."""
        others = [user for user in self.node.users if user is not self.second.node]
        if self.first is None:
            return [], others
        parts = _parts(self.node)
        taken = [user for user in others if user not in parts]
        kept = list[Node]()
        for part in parts:
            (kept if _place(part) != self.found.result else taken).extend(part.users)
        return [user for user in taken if user is not self.second.node], kept

    def _unwritable(self, declaration: Declaration, named: dict[str, Any]) -> str | None:
        """Give why the fused op may not write over what the first call only reads, or None.

        What takes the results of the first call then gets other strides.
        """
        over = [name for name in declaration.mutates if name not in self.second.declaration.mutates]
        order = {node: place for place, node in enumerate(self.node.graph.nodes)}
        second = self.second.node
        for user in self._users()[1] if over else ():
            if order[user] < order[second]:
                return f"{user.name} takes what {self.node.name} gives before {second.name}"
            if not is_ours(user):
                return f"{user.name} isn't known to take what isn't contiguous"
        tensors = [x for x in examples(list(named.values())) if isinstance(x, Tensor)]
        for name in over:
            if dynamo.misplaced(example(named[name]), tensors):
                return f"{name} would be written over, at an offset that varies with sizes"
            reason = reuse.refusal(named[name], second, (self.node, second))
            if reason is not None:
                return reason
        return None

    def _late(self) -> list[Node]:
        """Give what the second call takes that is made after the first one."""
        order = {node: place for place, node in enumerate(self.node.graph.nodes)}
        others = [n for n in self.second.node.all_input_nodes if n is not self.second.values[0]]
        return [node for node in others if order[node] > order[self.node]]

    def _unfit(self, declaration: Declaration, values: list[Any]) -> str | None:
        """Give why the fused op doesn't take these arguments, or None."""
        for parameter, value in zip(declaration.signature.parameters.values(), values, strict=True):
            if value is None and parameter.annotation is Tensor:
                why = f"{parameter.name} is None, which {self.found.fused} doesn't take"
                return f"{why}: {self.found.absent}" if self.found.absent else why
        args = examples(values)
        # Grad mode is that of the frame's first node: what changes it counts as switching it on.
        graded = torch.is_grad_enabled() or any(map(changes_state, self.node.graph.nodes))
        if graded and any(isinstance(a, Tensor) and a.requires_grad for a in args):
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
        second, parts = self.second.node, _parts(self.node)
        fused = (self.found.fused, (self.found.first, self.found.second))
        noted = (*self.node.meta.get(FUSED, ()), fused)
        with graph.inserting_before(second if self._late() or self.writes else self.node):
            one = graph.call_function(target, args)
        one.meta = {**second.meta, FUSED: noted}
        if self.writes and self.first is not None:
            for part in parts:  # is written where its argument is, or nobody takes it
                part.replace_all_uses_with(self.first.values[_place(part)])
            self._erase(parts)
            return
        made, first = example(second), example(self.node)
        moved = {part: _place(part) + 1 for part in parts if _place(part) != self.found.result}
        results = (*made, *first[1:]) if parts else made
        if self.first is None:
            results, moved = (made, first), {second: 0, self.node: 1}
        one.meta["example_value"] = results
        for old, place in moved.items():
            with graph.inserting_after(one):
                new = graph.call_function(operator.getitem, (one, place))
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
        second.replace_all_uses_with(one)
        self._erase(parts)

    def _erase(self, parts: list[Node]) -> None:
        for old in (self.second.node, *parts, self.node):
            self.node.graph.erase_node(old)


def pairs_in(graph: Graph) -> Iterator[Pair]:
    """Find the pairs that a pass knows, those of calls that have just been fused, too."""
    for node in list(graph.nodes):
        second = call_of(node)
        pair = None if second is None else _pair(second)
        if pair is not None:
            yield pair


def _pair(second: Call) -> Pair | None:
    value: Any = second.values[0] if second.values else None
    between, result = None, 0
    if isinstance(value, Node) and _name(value) in _VIEWS and isinstance(value.args[0], Node):
        between, value = _name(value), value.args[0]
    if not isinstance(value, Node):
        return None
    if value.target is operator.getitem and value in _parts(value.args[0]):
        value, result = value.args[0], _place(value)
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


def _place(part: Node) -> int:
    return cast(int, part.args[1])


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
