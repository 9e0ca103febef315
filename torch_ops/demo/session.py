"""The demo's steps: answer, accelerate, compile, swap while answering, compare, measure."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_ops import dynamo, set_inline, trace
from torch_ops.attention import Attention, OverrideToken, override_attention_backend
from torch_ops.demo.decoding import (
    Answer,
    GraphCounter,
    Runner,
    compiled,
    decode,
    eager,
    static,
)
from torch_ops.demo.progress import Progress
from torch_ops.demo.report import LayerBackends, OpCalls, Report, Swapped, op_calls
from torch_ops.demo.weights import NAME, Chat, load
from torch_ops.integrations.transformers import accelerate

__all__ = ["Session", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What a session does.

    Attributes:
        target: Attention backend that the chosen layers are swapped to.
        where: Glob over qualified layer names that chooses them; default every other layer.
        limit: Most tokens of an answer.
        measured: Tokens per measurement.
        rounds: Measurements of each contender; the best counts.
        seconds: No further round is begun after this time.
    """

    target: str = "torch_math"
    where: str = "*.layers.*[02468].*"
    limit: int = 64
    measured: int = 48
    rounds: int = 3
    seconds: float = 60.0


@dataclass
class _Swapping:
    """Swaps attention backends between two tokens and counts what that compiles."""

    model: torch.nn.Module
    settings: Settings
    counter: GraphCounter
    length: int
    done: list[tuple[str, int, int]] = field(default_factory=list)
    token: OverrideToken | None = None
    layers: dict[str, str] = field(default_factory=dict)

    def __call__(self, tokens: int) -> None:
        """Swap half way through the answer, and back half way through the rest."""
        half = max(1, self.length // 2)
        if tokens == half:
            self.swap(tokens)
        elif tokens == max(half + 1, self.length * 3 // 4):
            self.back(tokens)

    def swap(self, tokens: int) -> None:
        target, where = self.settings.target, self.settings.where
        self.token = override_attention_backend(self.model, target, where=where)
        what = f"{len(self.token.report.switched)} layers to {target}"
        self.done.append((what, tokens, self.counter.graphs))
        self.layers = backends(self.model)

    def back(self, tokens: int) -> None:
        if self.token is not None:
            self.token.undo()
            self.token = None
            self.done.append(("back", tokens, self.counter.graphs))

    def costs(self) -> tuple[Swapped, ...]:
        """Each swap with the graphs compiled until the next one."""
        ends = [*(graphs for _, _, graphs in self.done[1:]), self.counter.graphs]
        return tuple(
            Swapped(what, tokens, end - graphs)
            for (what, tokens, graphs), end in zip(self.done, ends, strict=True)
        )


@dataclass(frozen=True)
class _Served:
    """The accelerated model's answer, and how it came about."""

    answer: Answer
    calls: tuple[OpCalls, ...]
    layers: tuple[LayerBackends, ...]
    graphs_before: int
    graph_breaks: int


class Session:
    """One run of the demo; `run` gives the report."""

    def __init__(
        self, question: str, expected: str | None, settings: Settings, progress: Progress
    ) -> None:
        self._question = question
        self._expected = expected
        self._settings = settings
        self._progress = progress
        self._counter = GraphCounter()

    def run(self) -> Report:
        """Do all steps; every op stays one call, which compiles sooner: a sixth of a CPU's time.

        Raises:
            MissingExtraError: a package is missing.
        """
        undo = set_inline(False)
        try:
            return self._run()
        finally:
            undo()

    def _run(self) -> Report:
        with self._progress.step(f"Loading {NAME}"):
            chat = load()
        prompt = chat.prompt(self._question)
        dynamo.mark_dynamic(prompt, 1)  # so the first graph takes prompts of any length
        slots = prompt.shape[1] + max(self._settings.limit, self._settings.measured) + 1
        untouched, ours = chat.model, copy.deepcopy(chat.model)
        with self._progress.step("Answering with the untouched model"):
            length = len(self._answer(eager(untouched), prompt, chat).tokens)
        with self._progress.step("Putting a copy of it on torch_ops"):
            acceleration = accelerate(ours)
        runner = compiled(ours, slots, self._counter)
        swapping = _Swapping(ours, self._settings, self._counter, length)
        served = self._serve(runner, prompt, chat, swapping)
        with self._progress.step("Comparing logits with the untouched model's"):
            difference, unexplained = _compare(untouched, runner, prompt, served.answer)
        speeds = self._measure([runner, eager(untouched), static(untouched, slots)], prompt)
        return Report(
            question=self._question,
            answer=chat.text(served.answer.tokens),
            expected=self._expected,
            calls=served.calls,
            layers=served.layers,
            swaps=swapping.costs(),
            graph_breaks=served.graph_breaks,
            graphs_before=served.graphs_before,
            graphs_after=self._counter.graphs,
            max_logit_diff=difference,
            unexplained=unexplained,
            tokens_per_s=speeds[0],
            baseline_eager_tokens_per_s=speeds[1],
            baseline_compiled_tokens_per_s=speeds[2],
            measured_tokens=self._settings.measured,
            acceleration=str(acceleration),
        )

    def _answer(self, runner: Runner, prompt: Tensor, chat: Chat, before: Any = None) -> Answer:
        limit = self._settings.limit
        return decode(runner, prompt, limit, end=chat.end, before=before, keep_logits=True)

    def _serve(self, runner: Runner, prompt: Tensor, chat: Chat, swapping: _Swapping) -> _Served:
        """Answer twice with swaps: the second time nothing may be compiled any more."""

        def before(tokens: int) -> None:
            self._progress.note(f"Answering, {tokens} tokens")
            swapping(tokens)

        breaks, first = _graph_breaks(), backends(swapping.model)
        with self._progress.step("Compiling the graphs of the prompt and of a further token"):
            decode(runner, prompt, 2)
        graphs = self._counter.graphs
        with self._progress.step("Answering, attention swapped half way and back"), trace() as seen:
            answer = self._answer(runner, prompt, chat, before)
            swapping.back(len(answer.tokens))
        last = backends(swapping.model)
        with self._progress.step("Answering again, swapped and back again"):
            again = self._answer(runner, prompt, chat, before)
            swapping.back(len(again.tokens))
        during = swapping.layers or first
        return _Served(
            answer,
            op_calls(seen),
            tuple(LayerBackends(name, first[name], during[name], last[name]) for name in first),
            graphs,
            _graph_breaks() - breaks,
        )

    def _measure(self, runners: list[Runner], prompt: Tensor) -> list[float]:
        """Tokens per second of each runner: the best of some rounds, taken in turn."""
        with self._progress.step("Compiling the untouched model, static cache"):
            decode(runners[-1], prompt, 3)
        best = [0.0] * len(runners)
        rounds, begun = self._settings.rounds, time.monotonic()
        with self._progress.step("Measuring"):
            for number in range(rounds):
                if number and time.monotonic() - begun > self._settings.seconds:
                    break
                self._progress.note(f"Measuring, round {number + 1} of {rounds}")
                for i, runner in enumerate(runners):
                    answer = decode(runner, prompt, self._settings.measured + 1)
                    best[i] = max(best[i], answer.rate())
        return best


def backends(model: torch.nn.Module) -> dict[str, str]:
    """What each attention layer of a model runs, by name."""
    return {
        name: module.backend.value
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    }


@torch.no_grad()
def _compare(untouched: Any, runner: Runner, prompt: Tensor, answer: Answer) -> tuple[float, int]:
    """Compare with the untouched model on the same tokens.

    Returns:
        The largest difference of a logit, in the answer's steps and for the whole text at once,
        and how many tokens differ from the untouched choice by more than that.
    """
    text = torch.cat((prompt, torch.tensor([answer.tokens[:-1]], dtype=prompt.dtype)), dim=1)
    expected: Tensor = untouched(input_ids=text).logits[0]
    at_once = runner.logits(runner.prompt, text, runner.cache())
    difference = float((at_once - expected).abs().max())
    chosen = expected[prompt.shape[1] - 1 :]
    steps = torch.stack(answer.logits)
    difference = max(difference, float((steps - chosen).abs().max()))
    tokens = torch.tensor(answer.tokens)
    behind = chosen.max(dim=-1).values - chosen.gather(1, tokens[:, None])[:, 0]
    return difference, int((behind > difference).sum())


def _graph_breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())
