"""Whether a call in a graph of Dynamo's may write over a value that a node gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Node

__all__ = ["refusal"]

_share = torch._C._is_alias_of  # type: ignore[attr-defined]


def refusal(value: Node, last: Node, calls: Sequence[Node]) -> str | None:
    """Give why a call in the place of ``last`` may not write over a value, or None.

    It may where a node of the graph made the memory, and nothing reads that afterwards: fake
    results share storages as real ones do.

    Args:
        value: What is written over.
        last: The later one of the calls.
        calls: Those that the new one stands for.
    """
    order = {node: place for place, node in enumerate(value.graph.nodes)}
    holders = [node for node in order if any(_held(node, value))]
    if holders[0].op != "call_function" and holders[0].op != "call_method":
        return f"{value.name} would be written over, and {holders[0].name} is its caller's"
    for holder in holders:
        for user in holder.users:
            if user in calls:
                continue
            if order[user] > order[last]:
                return f"{value.name} would be written over, and {user.name} reads its memory later"
            if "example_value" not in user.meta:
                return f"{value.name} would be written over, and {user.name} may keep its memory"
    return None


def _held(node: Node, value: Node) -> Iterator[bool]:
    """Say of each tensor that a node gives whether it lies in the memory of a value."""
    found = node.meta.get("example_value")
    for tensor in found if isinstance(found, tuple | list) else (found,):
        if isinstance(tensor, Tensor):
            yield _share(tensor, value.meta["example_value"])
