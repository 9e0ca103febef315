"""Continuous batching: requests join and leave a batch between any two tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torch_ops.integrations.transformers.cache import argument
from torch_ops.integrations.transformers.paged import OutOfPagesError, PagedCache

__all__ = ["Request", "Server"]


@dataclass
class Request:
    """A prompt and what was answered so far.

    Attributes:
        number: Which one of its server.
        prompt: Token ids.
        limit: Most tokens of the answer.
        tokens: The answer, greedy.
        margins: By how much each token's logit was above the next best one's.
        state: Where it is.
        sequence: Of the cache, while it runs.
    """

    number: int
    prompt: tuple[int, ...]
    limit: int
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    state: Literal["waiting", "running", "done", "cancelled"] = "waiting"
    sequence: int = -1


class Server:
    """Answers requests together, as many at once as there are rows and pages.

    Args:
        model: An accelerated model.
        cache: Whose pages the requests share.
        rows: Most requests at once; each step has so many rows, so that one graph serves all.
        end: Token that ends an answer.
        decode: What runs a step, the model itself or compiled; default the model.

    Raises:
        ValueError: there are no rows.
    """

    def __init__(
        self,
        model: Any,
        cache: PagedCache,
        *,
        rows: int,
        end: int | None,
        decode: Callable[..., Any] | None = None,
    ) -> None:
        if rows < 1:
            raise ValueError(f"Server: argument 'rows' is {rows} (accepted: at least 1)")
        self._model, self._cache, self._rows, self._end = model, cache, rows, end
        self._vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        self._decode_with = model if decode is None else decode
        self._argument = argument(model)
        self._device = next(model.parameters()).device
        self.requests: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps = self.evictions = 0

    def submit(self, prompt: Sequence[int], limit: int) -> Request:
        """Queue a request.

        Raises:
            ValueError: the prompt is empty or holds what is no token of the model, the limit is
                below 1, or both together are too long for the model or the pool.
        """
        strange = [t for t in prompt if type(t) is not int or not 0 <= t < self._vocabulary]
        if strange:
            raise ValueError(
                f"Server.submit: received a prompt with {strange[0]!r} (accepted: token ids, ints "
                f"from 0 to {self._vocabulary - 1})"
            )
        if not prompt or limit < 1:
            raise ValueError(
                f"Server.submit: received a prompt of {len(prompt)} tokens and limit {limit} "
                "(accepted: at least one of each)"
            )
        if len(prompt) + limit - 1 > self._cache.longest:  # the last token is never read
            raise ValueError(
                f"Server.submit: received a prompt of {len(prompt)} tokens and limit {limit} "
                f"(accepted: at most {self._cache.longest + 1} in all)"
            )
        request = Request(len(self.requests), tuple(prompt), limit)
        self.requests.append(request)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; what it has answered stays in it, and the others don't notice.

        Raises:
            ValueError: it is another server's.
        """
        if not any(own is request for own in self.requests):
            raise ValueError(
                f"Server.cancel: received request {request.number} of another server (accepted: "
                "what submit() of this one returned)"
            )
        if request.state == "waiting":
            self.waiting.remove(request)
        elif request.state == "running":
            self._leave(request)
        if request.state != "done":
            request.state = "cancelled"

    def step(self) -> bool:
        """Begin what there is room for, and give all that run a token more.

        Returns:
            Whether there is anything left to do.

        Raises:
            OutOfPagesError: others than this server's requests hold the pages that it needs.

        After this or whatever a forward raises, the next step goes on where the last one ended.
        """
        self._admit()
        if self.running:
            self._decode()
            self.steps += 1
        return bool(self.running or self.waiting)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._rows:
            request = self.waiting[0]
            # One that was evicted goes on behind what it had answered.
            tokens = [*request.prompt, *request.tokens]
            sequence = self._cache.open()
            try:
                self._cache.plan([sequence], [len(tokens)])
            except OutOfPagesError:
                self._cache.close(sequence)
                if not self.running:
                    raise
                return
            self.waiting.popleft()
            request.sequence, request.state = sequence, "running"
            self.running.append(request)
            try:
                logits = self._run(self._model, torch.tensor([tokens]), logits_to_keep=1)
            except BaseException:
                self._wait_again(request)
                raise
            self._take([request], logits[:, -1])

    def _decode(self) -> None:
        while True:
            sequences = [request.sequence for request in self.running]
            try:
                self._cache.plan(sequences, [1] * len(sequences), rows=self._rows)
                break
            except OutOfPagesError:
                if len(self.running) == 1:
                    raise
                self._evict(self.running[-1])
        last = [request.tokens[-1] for request in self.running]
        rows = torch.tensor([*last, *[0] * (self._rows - len(last))])[:, None]
        before = [self._cache.length(sequence) - 1 for sequence in sequences]
        try:
            logits = self._run(self._decode_with, rows)
        except BaseException:
            for sequence, length in zip(sequences, before, strict=True):
                self._cache.cut(sequence, length)
            raise
        self._take(list(self.running), logits[: len(last), -1])

    def _evict(self, request: Request) -> None:
        """Free the pages of the youngest request; it waits to be run again."""
        self._wait_again(request)
        self.evictions += 1

    def _wait_again(self, request: Request) -> None:
        self._leave(request)
        request.state = "waiting"
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self._cache.close(request.sequence)
        self.running.remove(request)

    @torch.no_grad()
    def _run(self, function: Callable[..., Any], rows: Tensor, **settings: Any) -> Tensor:
        arguments = {self._argument: self._cache, **settings}
        try:
            logits: Tensor = function(input_ids=rows.to(self._device), **arguments).logits
        except BaseException:
            self._cache.drop_plan()
            raise
        return logits

    def _take(self, requests: list[Request], logits: Tensor) -> None:
        """Append each request's best token, and end those that are complete."""
        best = logits.float().topk(2, dim=-1)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        for request, token, margin in zip(
            requests, best.indices[:, 0].tolist(), margins, strict=True
        ):
            request.tokens.append(token)
            request.margins.append(margin)
            if token == self._end or len(request.tokens) == request.limit:
                self._leave(request)
                request.state = "done"
