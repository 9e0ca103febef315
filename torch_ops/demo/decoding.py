"""Greedy decoding, the same loop for every way to run a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Answer", "GraphCounter", "Runner", "compiled", "decode", "eager", "static"]


class GraphCounter:
    """A backend of `torch.compile`: Inductor, counting the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        compiled_graph: Any = compile_fx(graph, inputs)
        self.graphs += 1  # here: Dynamo may start over and give the same graph again
        return compiled_graph  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Runner:
    """One way to run a model: for the prompt, for further tokens, and with which cache."""

    prompt: Callable[..., Any]
    step: Callable[..., Any]
    cache: Callable[[], Any]
    cache_argument: str

    def logits(self, function: Callable[..., Any], ids: Tensor, cache: Any) -> Tensor:
        """Call ``function`` on ``ids`` ``[1, S]``; returns logits ``[S, vocabulary]``."""
        out: Tensor = function(input_ids=ids, **{self.cache_argument: cache}).logits[0]
        return out


@dataclass
class Answer:
    """Tokens, the logits that each was chosen from, and the seconds that each step took."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def rate(self) -> float:
        """Tokens per second, the prompt not counted."""
        return len(self.seconds) / sum(self.seconds)


@torch.no_grad()
def decode(
    runner: Runner,
    prompt: Tensor,
    limit: int,
    *,
    end: int | None = None,
    before: Callable[[int], None] | None = None,
    keep_logits: bool = False,
) -> Answer:
    """Decode greedily.

    Args:
        runner: How to run the model.
        prompt: Token ids, ``[1, S]``.
        limit: Most tokens.
        end: Token to stop after; None goes on to the limit.
        before: Called with the number of tokens so far, before each step after the prompt.
        keep_logits: Keep each token's logits, and don't hurry.

    Returns:
        The answer; ``end`` is its last token if it ended.
    """
    answer = Answer()
    cache = runner.cache()
    logits = runner.logits(runner.prompt, prompt, cache)[-1]
    while True:
        token = logits.argmax()
        answer.tokens.append(int(token))
        if keep_logits:
            answer.logits.append(logits.clone())
        if len(answer.tokens) == limit or answer.tokens[-1] == end:
            return answer
        if before is not None:
            before(len(answer.tokens))
        begun = time.perf_counter()
        logits = runner.logits(runner.step, token.view(1, 1), cache)[-1]
        answer.seconds.append(time.perf_counter() - begun)


def eager(model: Any) -> Runner:
    """The model as it is, with the cache that generate() uses."""
    from transformers import DynamicCache

    from torch_ops.integrations.transformers.cache import argument

    def cache() -> Any:
        return DynamicCache(config=model.config)

    return Runner(model, model, cache, argument(model))


def static(model: Any, slots: int) -> Runner:
    """The model compiled by transformers' own recipe: static cache, the prompt run eagerly."""
    from transformers import StaticCache

    from torch_ops.integrations.transformers.cache import argument

    def cache() -> Any:
        return StaticCache(config=model.config, max_cache_len=slots)

    step = torch.compile(model.forward, fullgraph=True)
    return Runner(model, step, cache, argument(model))


def compiled(model: Any, slots: int, counter: GraphCounter) -> Runner:
    """An accelerated model compiled whole, any length, the prompt too."""
    from torch_ops.integrations.transformers.cache import SlotCache, argument

    def cache() -> Any:
        return SlotCache(model.config, slots, dtype=model.dtype, device=model.device)

    step = torch.compile(model.forward, fullgraph=True, backend=counter)
    return Runner(step, step, cache, argument(model))
