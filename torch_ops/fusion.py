"""Pairs of calls that one op computes: found in compiled graphs, fused, and reported.

A pass is named as the op that it puts in the place of two. It changes no bits, and no backend: what
the two calls run on has to serve the op too. Where it doesn't fuse a pair, `report` says why.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from torch_ops import inlining, locks, matching, pairs, policy
from torch_ops.errors import listing, nearest
from torch_ops.graphs import examples
from torch_ops.matching import Pair
from torch_ops.pairs import Pass
from torch_ops.platform import Platform, platform_of

__all__ = ["PASSES", "Fusion", "disable", "record", "report"]

_KEPT = 1000
_lock = locks.lock()
_found: deque[Fusion] = deque(maxlen=_KEPT)
_recording: list[list[Fusion]] = []
_disabled: list[frozenset[str]] = []


PASSES = tuple(pairs.PASSES)
"""Names of all passes."""


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
        policy.take_back(_disabled, off)

    return undo


def fuse(graph_module: GraphModule) -> None:
    """Put one call in the place of every pair that a pass knows, in a graph of Dynamo's."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            changed = [_fused(pair) for pair in matching.pairs_in(module.graph)]
            if any(changed):
                module.graph.lint()
                module.recompile()


def _fused(pair: Pair) -> bool:
    """Fuse a pair where that is right, and note what became of it."""
    first, second = pair.node.name, pair.second.node
    values, reason = pair.arguments()
    backend, reason = (None, reason) if reason is not None else _judge(pair, examples(values))
    trace = re.findall(r'File "([^<].*?)", line (\d+)', str(second.meta.get("stack_trace", "")))
    place = ":".join(trace[-1]) if trace else ""
    noted = Fusion(pair.found.fused, (first, second.name), backend is not None, reason, place)
    if backend is not None:
        pair.replace(values, backend)
    with _lock:
        for kept in (_found, *_recording):
            kept.append(noted)
    return noted.fused


def _judge(pair: Pair, args: list[Any]) -> tuple[str | None, str]:
    """Give the backend of the call that may stand for both; None, and why, where none may."""
    from torch_ops import runtime

    found, wanted = pair.found, tuple(call.backend for call in pair.calls)
    platform, device = platform_of(args), args[0].device
    if platform is None or device.type not in ("cpu", "cuda"):
        return None, f"device {device} has no kernels"
    calls = [*(examples(call.values) for call in pair.calls), args]
    runtime.depend(
        ("fusion", found.fused, wanted, device), lambda: _serving(found, platform, wanted)
    )
    backend, reason = _serving(found, platform, wanted, calls)
    for call in pair.calls if pair.writes and backend is not None else ():
        if inlining.decide(call.declaration.name, examples(call.values), call.backend).inlined:
            return None, f"{call.declaration.name} dissolves, and what writes stays one call"
    if backend is not None:
        runtime.depend_on_policy(found.fused, tuple(args), backend or None)
    return backend, reason


def _serving(
    found: Pass,
    platform: Platform,
    asked: tuple[str | None, ...],
    calls: Sequence[Sequence[Any] | None] | None = None,
) -> tuple[str | None, str]:
    if any(found.fused in off for off in _disabled):
        return None, "switched off by fusion.disable"
    return pairs.serving(found, platform, asked, calls)
