"""Whether a call in a graph of Dynamo's may write over a value that a node gives."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Node

__all__ = ["refusal"]

_share = torch._C._is_alias_of  # type: ignore[attr-defined]


def refusal(value: Node, last: Node, calls: Sequence[Node]) -> str | None:
    """Give why a call in the place of ``last`` may not write over a value, or None.

    It may where a node of the graph made the memory, and nothing reads that afterwards, no backward
    either: fake results share storages as real ones do. Dropout's alone is a copy where the real
    one is its argument, as nothing is dropped.

    Args:
        value: What is written over.
        last: The later one of the calls.
        calls: Those that the new one stands for.
    """
    if _may_overlap(value.meta["example_value"]):
        return f"{value.name} would be written over, and its elements may share memory"
    order = {node: place for place, node in enumerate(value.graph.nodes)}
    holders = [node for node in order if any(_held(node, value))]
    if holders[0].op != "call_function" and holders[0].op != "call_method":
        return f"{value.name} would be written over, and {holders[0].name} is its caller's"
    for node in dict.fromkeys(node for holder in holders for node in (holder, *holder.users)):
        if node in calls:
            continue
        if order[node] > order[last]:
            return f"{value.name} would be written over, and {node.name} reads its memory later"
        if "example_value" not in node.meta:
            return f"{value.name} would be written over, and {node.name} may keep its memory"
        if any(tensor.requires_grad for tensor in _tensors(node)):
            return f"{value.name} would be written over, and {node.name} may need it backward"
        if "dropout" in str(getattr(node.target, "__name__", node.target)):
            return f"{value.name} would be written over, and {node.name} may give what it takes"
    return None


def _may_overlap(x: Tensor) -> bool:
    """Whether a step of a dimension doesn't get past all that smaller ones reach, as of windows."""
    reach = 0
    steps = ((step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size != 1)
    for step, size in sorted(steps, key=operator.itemgetter(0)):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _held(node: Node, value: Node) -> Iterator[bool]:
    """Say of each tensor that a node gives whether it lies in the memory of a value."""
    for tensor in _tensors(node):
        yield _share(tensor, value.meta["example_value"])


def _tensors(node: Node) -> list[Tensor]:
    found = node.meta.get("example_value")
    several = found if isinstance(found, tuple | list) else (found,)
    return [tensor for tensor in several if isinstance(tensor, Tensor)]
