"""The serving demo: a batch of requests, attention swapped and a request cancelled meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_ops import trace
from torch_ops.attention import AttentionBackend, OverrideToken, override_attention_backend
from torch_ops.demo.progress import Progress
from torch_ops.demo.report import op_calls
from torch_ops.demo.serve_report import ServeReport
from torch_ops.demo.server import Request, Server
from torch_ops.demo.session import backends
from torch_ops.demo.weights import NAME, Chat, load
from torch_ops.errors import AttentionOverrideError
from torch_ops.integrations.transformers import accelerate
from torch_ops.integrations.transformers.paged import PagedCache

__all__ = ["QUESTIONS", "ServeSettings", "serve", "serve_model"]

QUESTIONS = tuple(
    f"{ask} {of}?"
    for ask in (
        "What is the capital of",
        "Name a river in",
        "Which language is spoken in",
        "Where is",
    )
    for of in ("France", "Japan", "Italy", "Egypt", "Norway", "Brazil", "India", "Canada")
)
TIES = {torch.float32: 2e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Margins by dtype below which a token may differ between batches: two logits' differences, each as
large as the demo allows it in float32, and four steps between numbers near 16 in narrow dtypes."""


@dataclass(frozen=True)
class ServeSettings:
    """How requests are served.

    Attributes:
        requests: How many.
        rows: Most at once.
        limit: Most tokens of an answer.
        page_size: Tokens of a page.
        targets: Attention backends, of which the first that can serve is swapped to.
        compiled: Whether decode steps are compiled; default on GPUs alone.
    """

    requests: int = 32
    rows: int = 8
    limit: int = 16
    page_size: int = 16
    targets: tuple[str, ...] = ("flashinfer_fa2", "triton", "torch_math")
    compiled: bool | None = None


def serve(settings: ServeSettings, device: str, progress: Progress | None = None) -> ServeReport:
    """Serve questions with SmolLM2.

    Raises:
        MissingExtraError: a package is missing.
    """
    progress = progress or Progress()
    with progress.step(f"Loading {NAME}"):
        chat = load()
    asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(settings.requests)]
    prompts = [chat.prompt(question)[0].tolist() for question in asked]
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    model = chat.model.to(device, dtype)
    report, requests = serve_model(model, prompts, chat.end, settings, progress)
    return _with_answers(report, chat, asked, requests)


def _with_answers(
    report: ServeReport, chat: Chat, asked: list[str], requests: list[Request]
) -> ServeReport:
    shown = [r for r in requests if r.state == "done"][:4]
    texts = tuple((asked[r.number], " ".join(chat.text(r.tokens).split())) for r in shown)
    return replace(report, answers=texts)


def serve_model(
    model: Any,
    prompts: list[list[int]],
    end: int | None,
    settings: ServeSettings,
    progress: Progress,
) -> tuple[ServeReport, list[Request]]:
    """Serve prompts twice: undisturbed, then with swaps and a request cancelled.

    Args:
        model: Of transformers; it is accelerated, and put back at the end.
        prompts: Token ids.
        end: Token that ends an answer.
        settings: How.
        progress: Where to show progress.

    Returns:
        The report, without answers, and the requests of the second run.
    """
    with progress.step("Putting the model on torch_ops"):
        acceleration = accelerate(model)
    try:
        return _serve_both(model, prompts, end, settings, progress)
    finally:
        acceleration.undo()


def _serve_both(
    model: Any,
    prompts: list[list[int]],
    end: int | None,
    settings: ServeSettings,
    progress: Progress,
) -> tuple[ServeReport, list[Request]]:
    cache, decode = _cache(model, prompts, settings), _decode(model, settings)

    def server(count: int, limit: int) -> Server:
        made = Server(model, cache, rows=settings.rows, end=end, decode=decode)
        for prompt in prompts[:count]:
            made.submit(prompt, limit)
        return made

    with progress.step("Compiling what the first request needs"):
        first = server(1, min(2, settings.limit))
        while first.step():
            pass
    with progress.step(f"Serving {len(prompts)} requests"):
        plain = server(len(prompts), settings.limit)
        while plain.step():
            progress.note(f"Serving {len(prompts)} requests, step {plain.steps}")
    second = server(len(prompts), settings.limit)
    events = _Events(model, second, plain, settings)
    begun = time.perf_counter()
    with progress.step("Again, with swaps and a request cancelled"), trace() as seen:
        events.before_step()
        while second.step():
            progress.note(f"Again, step {second.steps}")
            events.before_step()
    seconds = time.perf_counter() - begun
    events.back()
    changed, ties = _compare(plain.requests, second.requests, TIES[model.dtype])
    ended = events.cancelled
    report = ServeReport(
        device=str(model.device),
        requests=len(prompts),
        cancelled=(ended.number, len(ended.tokens)) if ended.state == "cancelled" else None,
        swaps=tuple(events.swaps),
        changed=changed,
        ties=ties,
        evictions=second.evictions,
        leaked=cache.pool.pages - cache.free_pages,
        calls=op_calls(seen),
        tokens=sum(len(request.tokens) for request in second.requests),
        seconds=seconds,
        answers=(),
    )
    return report, second.requests


def _cache(model: Any, prompts: list[list[int]], settings: ServeSettings) -> PagedCache:
    """Pages for as many requests as there are rows, the longest ones."""
    size = settings.page_size
    pages = settings.rows * -(-(max(map(len, prompts)) + settings.limit) // size)
    where = {"dtype": model.dtype, "device": model.device}
    return PagedCache(model.config, pages, page_size=size, **where)


def _decode(model: Any, settings: ServeSettings) -> Callable[..., Any]:
    on_gpu = model.device.type == "cuda"
    if not (on_gpu if settings.compiled is None else settings.compiled):
        plain: Callable[..., Any] = model
        return plain
    mode = "reduce-overhead" if on_gpu else "default"
    compiled: Callable[..., Any] = torch.compile(model, fullgraph=True, mode=mode)
    return compiled


class _Events:
    """What happens during the second run, at steps that the first one's length decides."""

    def __init__(self, model: Any, server: Server, plain: Server, settings: ServeSettings) -> None:
        self._model, self._server, self._targets = model, server, settings.targets
        self._total = plain.steps
        self._token: OverrideToken | None = None
        self._done = False
        # One that answers long enough to be cancelled half way.
        self.cancelled = server.requests[
            max(range(len(plain.requests)), key=lambda i: len(plain.requests[i].tokens))
        ]
        self._after = len(plain.requests[self.cancelled.number].tokens) // 2
        self.swaps: list[tuple[str, int]] = []

    def before_step(self) -> None:
        """Swap after a third of the steps, back after two; cancel when its time has come."""
        step = self._server.steps
        if not self._done and step >= self._total // 3:
            self._token, self._done = self._swap(), True
            self.swaps.append((self._target, step))
        elif self._token is not None and step >= self._total * 2 // 3:
            self.back()
            self.swaps.append(("what it was", step))
        if self.cancelled.state == "running" and len(self.cancelled.tokens) >= self._after:
            self._server.cancel(self.cancelled)

    def back(self) -> None:
        """Take the swap back."""
        if self._token is not None:
            self._token.undo()
            self._token = None

    def _swap(self) -> OverrideToken:
        """Swap to the first target that serves all layers, rather not to what decodes now."""
        refused: list[str] = []
        now = set(backends(self._model).values())
        for target in sorted(self._targets, key=now.__contains__):
            try:
                token = override_attention_backend(self._model, target)
            except AttentionOverrideError as error:
                refused.append(f"{target}: {error}")
                continue
            self._target = AttentionBackend(target).value
            return token
        raise AttentionOverrideError("serve-demo: no target can serve\n" + "\n".join(refused))


def _compare(
    plain: list[Request], second: list[Request], tie: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Give the requests that lost or changed something, and those that only met a tie.

    A cancelled one has to be a beginning of what it was without.
    """
    changed: list[int] = []
    ties: list[int] = []
    for before, after in zip(plain, second, strict=True):
        length = len(after.tokens) if after.state == "cancelled" else len(before.tokens)
        if after.tokens == before.tokens[:length]:
            continue
        pairs = zip(before.tokens, after.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        tied = at is not None and before.margins[at] <= tie
        (ties if tied else changed).append(before.number)
    return tuple(changed), tuple(ties)
