"""Continuous batching: every request gets what it gets alone, whatever happens beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.integrations import support
from tests.integrations.support import OutOfPagesError, PagedCache, model, tokens
from torch_ops.demo.progress import Silent
from torch_ops.demo.report import OpCalls
from torch_ops.demo.serve_report import ServeReport
from torch_ops.demo.server import Server
from torch_ops.demo.serving import ServeSettings, _compare, serve, serve_model
from torch_ops.integrations.transformers import accelerate

LENGTHS = (9, 1, 6, 14, 3)
LIMIT = 7
PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Answers of the untouched model, one prompt at a time."""
    made = model()
    return [
        support.generate(made, torch.tensor([prompt]), LIMIT)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def served(pages: int = 64, rows: int = 3, end: int | None = None) -> tuple[Server, Any]:
    made = model()
    accelerate(made)
    cache = PagedCache(made.config, pages, page_size=4)
    server = Server(made, cache, rows=rows, end=end)
    for prompt in PROMPTS:
        server.submit(prompt, LIMIT)
    return server, cache


def test_requests_join_as_others_leave(alone: list[list[int]]) -> None:
    server, cache = served()
    most = 0
    while server.step():
        most = max(most, len(server.running))
        if server.steps == 2:
            late = server.submit(PROMPTS[0], 3)
    assert [request.tokens for request in server.requests] == [*alone, alone[0][:3]]
    assert {request.state for request in server.requests} == {"done"}
    assert late.number == len(PROMPTS)
    assert most == 3
    assert server.evictions == 0
    assert cache.free_pages == 64


def test_an_answer_ends_with_the_end(alone: list[list[int]]) -> None:
    end = alone[0][2]
    server, _ = served(end=end)
    while server.step():
        pass
    for request, answer in zip(server.requests, alone, strict=True):
        length = answer.index(end) + 1 if end in answer else LIMIT
        assert request.tokens == answer[:length]


def test_requests_that_find_no_page_wait_and_lose_nothing(alone: list[list[int]]) -> None:
    server, cache = served(pages=6)
    while server.step():
        assert 0 <= cache.free_pages <= 6
    assert server.evictions > 0
    assert [request.tokens for request in server.requests] == alone
    assert cache.free_pages == 6


class BrokenOffError(Exception):
    """What a hook of a test raises."""


@pytest.mark.parametrize("part", ["model.layers.1.mlp", "lm_head"])
def test_a_forward_that_fails_loses_nothing(alone: list[list[int]], part: str) -> None:
    server, cache = served()
    failing = {"calls": 0}

    def fail(*_: Any) -> None:
        failing["calls"] += 1
        if failing["calls"] % 4 == 0:
            raise BrokenOffError

    server._model.get_submodule(part).register_forward_hook(fail)
    failed = 0
    while True:
        try:
            if not server.step():
                break
        except BrokenOffError:
            failed += 1
    assert failed > 3
    assert [request.tokens for request in server.requests] == alone
    assert cache.free_pages == 64


def test_what_a_server_can_not_do_is_refused() -> None:
    server, cache = served()
    prompts: tuple[Any, ...] = ([support.VOCABULARY], [1.5], "ab", [-1], [True])
    for prompt in prompts:
        with pytest.raises(ValueError, match=r"Server\.submit: received a prompt with .* 0 to 96"):
            server.submit(prompt, 3)
    assert len(server.requests) == len(PROMPTS)
    other, _ = served()
    with pytest.raises(ValueError, match="received request 0 of another server"):
        server.cancel(other.requests[0])
    assert other.requests[0].state == "waiting"
    with pytest.raises(ValueError, match="argument 'rows' is 0"):
        Server(server._model, cache, rows=0, end=None)


def test_pages_that_others_hold_are_waited_for(alone: list[list[int]]) -> None:
    server, cache = served(pages=6)
    other = cache.open()
    cache.plan([other], [16])
    server._model(tokens(1, 16), **{support.CACHE: cache})
    with pytest.raises(OutOfPagesError, match="3 more pages are needed and 2 of 6 are free"):
        server.step()
    assert [request.state for request in server.requests] == ["waiting"] * len(PROMPTS)
    cache.close(other)
    while server.step():
        pass
    assert [request.tokens for request in server.requests] == alone


def test_a_request_that_fits_no_pool_is_refused() -> None:
    server, _ = served(pages=5)
    server.submit([3] * 14, 7)
    with pytest.raises(ValueError, match=r"14 tokens and limit 8 \(accepted: at most 21 in all"):
        server.submit([3] * 14, 8)
    assert len(server.requests) == len(PROMPTS) + 1


def test_neighbours_of_a_cancelled_request_do_not_notice(alone: list[list[int]]) -> None:
    server, cache = served()
    server.step()
    server.step()
    running, waiting = server.requests[1], server.requests[4]
    server.cancel(running)
    server.cancel(waiting)
    kept = list(running.tokens)
    while server.step():
        pass
    assert running.tokens == kept == alone[1][: len(kept)]
    assert (len(kept), waiting.tokens) == (3, [])
    done = server.requests[0]
    server.cancel(done)
    assert (done.state, running.state, waiting.state) == ("done", "cancelled", "cancelled")
    for number in (0, 2, 3):
        assert server.requests[number].tokens == alone[number]
    assert cache.free_pages == 64


@pytest.mark.parametrize(("prompt", "limit"), [([], 1), ([3], 0)])
def test_requests_for_nothing_are_refused(prompt: list[int], limit: int) -> None:
    server, _ = served()
    with pytest.raises(ValueError, match=rf"a prompt of {len(prompt)} tokens and limit {limit}"):
        server.submit(prompt, limit)


@pytest.fixture(scope="module")
def report() -> ServeReport:
    made = model()
    settings = ServeSettings(requests=len(PROMPTS), rows=2, limit=LIMIT, page_size=4)
    found, requests = serve_model(made, PROMPTS, None, settings, Silent())
    assert type(made.model.norm).__name__ == "LlamaRMSNorm", "the model is put back"
    assert [request.state for request in requests].count("cancelled") == 1
    return found


def test_swaps_and_a_cancelled_request_change_nothing(report: ServeReport) -> None:
    assert report.ok
    assert (report.changed, report.leaked) == ((), 0)
    assert report.cancelled == (0, LIMIT // 2)
    assert [target for target, _ in report.swaps] == ["torch_math", "what it was"]
    assert report.tokens == LIMIT * (len(PROMPTS) - 1) + LIMIT // 2


def test_a_request_that_was_done_before_is_not_called_cancelled() -> None:
    settings = ServeSettings(requests=2, rows=2, limit=1, page_size=4)
    found, requests = serve_model(model(), PROMPTS[:2], None, settings, Silent())
    assert found.cancelled is None
    assert found.data["cancelled"] is None
    assert "none, answers were too short; no other one changed" in str(found)
    assert {request.state for request in requests} == {"done"}


def test_the_trace_names_kernels_before_the_swap_and_after(report: ServeReport) -> None:
    calls = {(c.backend, c.source): c.calls for c in report.calls if c.op == "attention"}
    assert calls["torch_flash", "declared"] % support.LAYERS == 0
    assert calls["torch_math", "layer"] % support.LAYERS == 0
    appended = sum(c.calls for c in report.calls if c.op.endswith("append_paged_kv_"))
    assert sum(calls.values()) == appended


def test_the_report_is_for_people_and_programs(report: ServeReport) -> None:
    text = str(replace(report, answers=(("Where is it?", "Here."),)))
    assert "Where is it?  Here." in text
    assert "request 0 after 3 tokens; no other one changed" in text
    assert text.splitlines()[-1].startswith('serve-demo: {"device": "cpu", "requests": 5')
    assert report.data["attention"] == ["torch_flash", "torch_math"]
    assert report.data["tokens_per_s"] > 0


@pytest.mark.parametrize(
    "loss",
    [
        {"changed": (3,)},
        {"leaked": 1},
        {"calls": (OpCalls("attention", "torch_math", "declared", 3),)},
    ],
)
def test_what_is_lost_is_not_ok(report: ServeReport, loss: dict[str, Any]) -> None:
    worse = replace(report, **loss)
    assert not worse.ok
    assert "NOT as required." in str(worse)


def test_what_differs_is_told_from_a_tie() -> None:
    plain, second = served()[0].requests, served()[0].requests
    for request in (*plain, *second):
        request.tokens, request.margins = [5, 6, 7], [1.0, 1e-4, 1.0]
        request.state = "done"
    second[0].tokens = [5, 9, 7]  # from a tie on
    second[1].tokens = [5, 6, 9]
    second[2].tokens = [5, 6]  # a token is lost
    second[3].tokens, second[3].state = [5, 6], "cancelled"
    second[4].tokens, second[4].state = [6], "cancelled"
    assert _compare(plain, second, 1e-3) == ((1, 2, 4), (0,))


@pytest.mark.exhaustive  # the demo's tests run the same weights
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")  # what transformers warns of is not ours to fail for
def test_real_weights_answer() -> None:
    found = serve(ServeSettings(requests=3, rows=3, limit=10), "cpu", Silent())
    assert found.ok
    assert any("Paris" in answer for _, answer in found.answers)
