"""Compiled graphs in a trace: what runs in one of them without a call of a kernel from Python.

A graph's calls are known when it is made. While a trace is open, the function that a compiled
frame calls stands behind one that counts a run; else it is the one that PyTorch has put there. What
the kernels' own calls told in a run is compared with what the graph holds: the rest has dissolved,
or is replayed from a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.fx import GraphModule, Node

from torch_ops import dynamo, foresight, locks, policy, tracing
from torch_ops.foresight import Planned
from torch_ops.graphs import FUSED, writes

__all__ = ["follow", "note_graphs"]

# Operators of PyTorch's that run the graphs they are given once, in the place where they stand.
_ONCE = ("invoke_subgraph", "tag_activation_checkpoint", "wrap", "wrap_with_set_grad_enabled")
_KEPT = 256  # kinds of runs of a graph; more start anew
_BRANCH = "it is in a branch or a loop of a compiled graph, which may run any number of times"
_LEFT_OUT = (
    "a compiled graph that holds it ran without calling it: its compiler has left it out, or "
    "replays it in a way of its own, or there was nothing to compute"
)
_PARTLY = "other calls of it in a compiled graph ran: it was replayed from a CUDA graph or left out"
_TWIN = "it equals another call of a compiled graph with gradients, and PyTorch may merge the two"
_BACKWARD = "it may be in the backward of a compiled graph that PyTorch's CUDA graphs replay"
_lock = locks.reentrant()
_graphs: dict[int, _Graph] = {}
_lacking: str | None = None
_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


def note_graphs() -> None:
    """Have traces count the graph that is being traced by Dynamo, if any."""
    global _lacking
    lacking = dynamo.follow(_found)
    if lacking is not None:
        _lacking = lacking


def follow() -> None:
    """Count runs of compiled graphs while a trace is open, and no longer."""
    with _lock:
        for graph in list(_graphs.values()):
            graph.switch(tracing.active())
    if _lacking is not None and tracing.active():
        reason = f"what compiled graphs inline or replay isn't known on this PyTorch: {_lacking}"
        tracing.note(tracing.Event(Counter(), uncounted=Counter({(None, reason): 0})))


def _found(graph_module: GraphModule, compiler: Any) -> Callable[[dict[str, Any], str], None]:
    graph = _Graph(graph_module, dynamo.may_replay(compiler))

    def installed(scope: dict[str, Any], name: str) -> None:
        if graph.calls:
            graph.attach(scope, name)

    return installed


class _Graph:
    """What is known of one compiled graph.

    Attributes:
        calls: The calls of ops that it holds.
    """

    def __init__(self, graph_module: GraphModule, may_replay: bool) -> None:
        inputs = dynamo.graph_inputs(graph_module.graph)
        found = list(_calls(graph_module))
        self._trains = torch.is_grad_enabled() and any(map(_requires_grad, inputs))
        self.calls = [(foresight.planned(node), certain) for node, certain in found]
        self._twins = _twins([node for node, _ in found]) if self._trains else set()
        self._fused = Counter(
            pair for node, certain in found if certain for pair in node.meta.get(FUSED, ())
        )
        kept = (call.op for call, certain in self.calls if certain and not call.dissolved)
        self._expected = Counter(kept)
        self._may_replay = may_replay
        self._symbols = foresight.symbols(inputs)
        self._events: dict[object, tracing.Event] = {}

    def attach(self, scope: dict[str, Any], name: str) -> None:
        """Remember where a compiled frame finds the function, as long as that lives."""
        self._scope, self._name = scope, name
        function: Callable[..., Any] = scope[name]
        self._counting: Callable[..., Any] | None = None
        number = id(self)
        self._function = weakref.ref(function, lambda _: _graphs.pop(number, None))
        with _lock:
            _graphs[number] = self
            self.switch(tracing.active())

    def switch(self, on: bool) -> None:
        """Let the compiled frame call the function, or what counts it."""
        present, function = self._scope.get(self._name), self._function()
        if function is None:
            return
        own = present is function
        if on and own:
            self._counting = self._scope[self._name] = self._counted(function)
        elif not on and self._counting is not None:
            if present is self._counting:  # else PyTorch has forgotten the frame
                self._scope[self._name] = function
            self._counting = None

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        local, lock, events = tracing.of_thread, tracing.lock, self._events
        scope = policy.current_scope
        places = list(self._symbols.values())

        def counted(*args: Any) -> Any:
            outer = local.calls
            ran = local.calls = {}
            try:
                result = shown(*args) if _profiling() else function(*args)
            except BaseException:
                for event, times in ran.items():
                    tracing.note(event, times)
                raise
            finally:
                local.calls = outer
            key: tuple[object, ...] = policy.generation, scope()
            if places or ran:
                key = (*key, *[args[place] for place in places], *ran.items())
            run = events.get(key) or self._judge(key, args, ran)
            with lock:  # as in `tracing.note`, a call of which would cost as much again
                for counts in tracing.open_counts:
                    counts[run] = counts.get(run, 0) + 1
            return result

        def shown(*args: Any) -> Any:
            with record_function(self._label(args)):
                return function(*args)

        dynamo.skip(counted.__code__)
        return counted

    def _judge(
        self, key: object, args: tuple[Any, ...], ran: dict[tracing.Event, int]
    ) -> tracing.Event:
        """Tell what a run was, by what its kernels told of themselves, and keep it for the like."""
        ways, lost = Counter[tracing.Way](), Counter[tuple[str | None, str]]()
        for event, times in ran.items():
            for way, count in event.calls.items():
                ways[way] += count * times
        called = Counter[str]()
        for way, count in ways.items():
            called[way.op] += count
        missing = self._expected - called
        for place, (call, certain) in enumerate(self.calls):
            replayed = not call.dissolved and self._may_replay and not called[call.op]
            if replayed and place in self._twins:
                lost[call.op, _TWIN] += 1
            elif not certain and (call.dissolved or (replayed and not ran)):
                lost[call.op, _BRANCH] += 0
            elif certain and (call.dissolved or (replayed and missing[call.op])):
                how = tracing.INLINED if call.dissolved else tracing.REPLAYED
                try:
                    ways[self._way(call, args)._replace(how=how)] += 1
                except Exception as error:  # a foreign predicate may raise anything: it's reported
                    lost[call.op, f"{type(error).__name__}: {error}".partition("\n")[0]] += 1
        for op, count in missing.items():
            if called[op] or not self._may_replay:
                lost[op, _PARTLY if self._may_replay else _LEFT_OUT] += count
        if self._trains and self._may_replay:
            lost[None, _BACKWARD] += 0
        if len(self._events) >= _KEPT:
            self._events.clear()
        self._events[key] = tracing.Event(ways, self._fused, lost)
        return self._events[key]

    def _way(self, call: Planned, args: tuple[Any, ...]) -> tracing.Way:
        sizes = {symbol: args[index] for symbol, index in self._symbols.items()}
        return foresight.foresee(call, sizes)

    def _label(self, args: tuple[Any, ...]) -> str:
        """Name a run in a profiler: its calls, and what they go to as far as that is known."""
        names = Counter[str]()
        for call, _ in self.calls:
            try:
                backend = self._way(call, args).backend.value
            except Exception as error:  # as in `_judge`
                backend = type(error).__name__
            names[f"{call.op} [{backend}{', inlined' if call.dissolved else ''}]"] += 1
        shown = (f"{count} x {name}" if count > 1 else name for name, count in names.items())
        return f"torch_ops::graph: {', '.join(shown)}"


def _calls(module: GraphModule, certain: bool = True) -> Iterator[tuple[Node, bool]]:
    """Give the calls of ops that may do something, and whether each is made once in a run."""
    needed: set[Node] = set()
    for node in reversed(module.graph.nodes):
        users = any(user in needed for user in node.users)
        if users or node.op == "output" or node.is_impure() or writes(node):
            needed.add(node)
    for node in module.graph.nodes:
        if node not in needed:
            continue
        if foresight.is_call(node):
            yield node, certain
        inner = [_module(module, value) for value in node.all_input_nodes]
        if node.op == "call_module":
            inner.append(module.get_submodule(str(node.target)))
        once = node.op == "call_module" or getattr(node.target, "__name__", "") in _ONCE
        for part in inner:
            if isinstance(part, GraphModule):
                yield from _calls(part, certain and once)


def _twins(nodes: list[Node]) -> set[int]:
    """Give the places of calls that equal one before them."""
    written = [(str(node.target), str(node.args), str(node.kwargs)) for node in nodes]
    return {place for place, text in enumerate(written) if text in written[:place]}


def _module(module: GraphModule, node: Node) -> Any:
    return getattr(module, str(node.target), None) if node.op == "get_attr" else None


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
