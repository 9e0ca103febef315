"""``python -m benchmarks generate``: rows are right, kept at once, and judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")
CPU = torch.device("cpu")
STEPS = 6


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is enough, and what a copy takes doesn't matter."""
    from benchmarks import _measure, generate

    monkeypatch.setitem(generate.SHAPES, "tiny", {**generate.TINY, "num_hidden_layers": 1})
    monkeypatch.setattr(_measure, "copy_rate", lambda device: 5e-4)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> list[CompileCounterWithBackend]:
    """Count graphs, and run them as they are."""
    from benchmarks import _generators

    found = []

    def compiled(call: Any, *, graphs: bool = True, whole: bool = True) -> Callable[..., Any]:
        found.append(CompileCounterWithBackend("eager"))
        made: Callable[..., Any] = torch.compile(
            call, backend=found[-1], dynamic=False, fullgraph=whole
        )
        return made

    monkeypatch.setattr(_generators, "compiled", compiled)
    return found


def bench() -> Any:
    from benchmarks import generate
    from benchmarks._generation import Bench

    return Bench(generate.SHAPES["tiny"], CPU, STEPS)


def test_a_small_run(counters: list[CompileCounterWithBackend], tmp_path: Path) -> None:
    from benchmarks.__main__ import main

    path, rows = tmp_path / "generate.json", tmp_path / "rows.jsonl"
    words = ["generate", "--shape", "tiny", "--steps", str(STEPS), "--workload", "b16x1k"]
    words += ["--workload", "prefill8k", "--workload", "swap", "--rows", str(rows)]
    assert main([*words, "--save", str(path)]) == 0
    report = json.loads(path.read_text())
    # Decode steps of two, the compiled prompts of two and the swap's steps: a graph each.
    assert [counter.frame_count for counter in counters if counter.frame_count] == [1] * 5
    assert [json.loads(line) for line in rows.read_text().splitlines()] == report["rows"]
    ours, theirs = "ours", ["transformers eager", "transformers compiled"]
    assert [row["candidate"] for row in report["rows"]] == [
        *theirs, ours, theirs[0], ours, theirs[1], "ours compiled", ours,
    ]  # fmt: skip
    assert not any("error" in row or "peak_gib" in row for row in report["rows"])
    decode, swap = report["rows"][2], report["rows"][-1]
    hidden, wide, vocabulary = 64, 96, 512
    layer = hidden * (64 + 2 * 32 + 64 + 3 * wide) + 2 * hidden
    tokens = 3 * (32 + 4 + STEPS / 2)
    floor = 2 * (layer + hidden + vocabulary * hidden + tokens * 2 * 2 * 16) / 5e5
    assert decode["floor_ms"] == pytest.approx(floor, rel=1e-3)  # of four digits
    assert decode["ratio"] == pytest.approx(decode["ms"] / floor, rel=0.05)
    assert swap["compiled"] == swap["parted"] == 0
    assert len(swap["swapped_ms"]) == STEPS
    assert {check["what"] for check in report["checks"]} >= {"largest difference of logits"}


def test_a_candidate_that_fails_is_a_row(
    counters: list[CompileCounterWithBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import _generators
    from benchmarks._generation import Job, Load
    from benchmarks._generators import Eager, Paged

    class Failing(Paged):
        def step(self, tokens: Tensor) -> Tensor:
            raise RuntimeError("broken off")

    made = bench()
    untouched = type(made.model.model.layers[0].self_attn)
    with torch.no_grad():
        row = made.measure(Job("decode", "b1x1k", Load(1, 8), "x", Failing))
        good = made.measure(Job("decode", "b1x1k", Load(1, 8), "y", Eager))
        monkeypatch.setattr(_generators, "PAGE", 0)
        early = made.measure(Job("decode", "b1x1k", Load(1, 8), "z", Paged))
    assert early["error"].startswith("ZeroDivisionError: ")
    assert "difference" not in row
    assert good["difference"] == 0
    assert row["error"] == "RuntimeError: broken off"
    assert good["ms"] > 0
    assert type(made.model.model.layers[0].self_attn) is untouched


def test_prompts_that_do_not_fit_run_in_chunks(
    monkeypatch: pytest.MonkeyPatch, counters: list[CompileCounterWithBackend]
) -> None:
    from benchmarks import _generation, _generators

    class Full(_generators.Paged):
        def prompt(self, ids: Tensor, chunk: int) -> Tensor:
            if chunk > 8:
                super().prompt(ids, chunk)  # what fails has begun
                raise torch.OutOfMemoryError("full")
            return super().prompt(ids, chunk)

    monkeypatch.setattr(_generation, "LEAST_CHUNK", 4)
    made = bench()
    load = _generation.Load(2, 20)
    with torch.no_grad():
        whole = made.measure(_generation.Job("prefill", "p", load, "whole", _generators.Eager))
        row = made.measure(_generation.Job("prefill", "p", load, "parts", Full))
        monkeypatch.setattr(_generation, "LEAST_CHUNK", 16)
        refused = made.measure(_generation.Job("prefill", "p", load, "parts", Full))
    assert (whole["chunk"], row["chunk"]) == (20, 5)
    assert row["difference"] <= 4 * torch.finfo(torch.bfloat16).eps
    assert refused["error"] == "OutOfMemoryError: full"


def test_what_is_not_reached_is_listed() -> None:
    from benchmarks import generate

    report = generate.run(seconds=0.002)
    assert report["rows"] == []
    assert report["not_measured"][0] == "b64x2k, transformers eager: not reached within 0.001 s"
    assert len(report["not_measured"]) == 14
    assert not report["ok"]
    assert "not measured: swap, ours" in generate.table(report)


def texts(tokens: list[list[int]], logits: Tensor) -> Any:
    from benchmarks._generation_swap import _Text

    return _Text([1.0] * len(tokens), [torch.tensor(row) for row in tokens], list(logits))


def test_gaps_are_those_of_the_logits_where_texts_part() -> None:
    from benchmarks._generation_swap import _changes

    logits = torch.tensor([[[5.0, 4.875, 1.0], [5.0, 4.0, 1.0]]], dtype=torch.bfloat16)
    plain = texts([[0, 0]], logits)
    found = _changes(plain, texts([[1, 0]], logits[..., [1, 0, 2]]))
    assert found == {"texts": 2, "parted": 1, "gaps": [0.025]}
    found = _changes(plain, texts([[0, 1]], logits[..., [1, 0, 2]]))
    assert found == {"texts": 2, "parted": 1, "gaps": [0.2]}
    assert _changes(plain, texts([[0, 0]], logits))["parted"] == 0


SWAP = {
    "workload": "swap", "candidate": "ours", "run": "1", "difference": 0.02, "gaps": [0.03],
    "compiled": 0,
    "back_is_same": True, "again_is_same": True, "graphs": True, "swapped_ms": [9, 40, 5, 5, 5],
    "back_ms": [5, 5, 5, 5], "again_ms": [6, 5, 5, 5],
}  # fmt: skip
ROW = {"workload": "b64x2k", "run": "1", "difference": 0.01}
OURS = {**ROW, "candidate": "ours", "ms": 9.0, "ratio": 1.2}
LIKE_SWAP = {**ROW, "workload": "b16x1k", "candidate": "transformers compiled"}
THEIRS = {**ROW, "candidate": "transformers compiled", "ms": 44.0, "ratio": 5.8}


@pytest.mark.parametrize(
    ("rows", "failed"),
    [
        ([OURS, THEIRS, LIKE_SWAP, SWAP], []),
        ([{**SWAP, "gaps": [], "difference": 0.0}], ["transformers compiled of b16x1k beside it"]),
        ([{**OURS, "ratio": 1.3}, THEIRS], ["step over the floor"]),
        ([OURS, {**THEIRS, "ms": 30.0}], ["times as fast as transformers compiled"]),
        ([OURS, {**THEIRS, "ms": 30.0, "run": "2"}], []),  # nothing is said across runs
        ([{**OURS, "difference": 0.1}, THEIRS], ["largest difference of logits"]),
        ([LIKE_SWAP, {**SWAP, "gaps": [0.01, 0.036]}], ["widest gap where texts part"]),
        ([LIKE_SWAP, {**SWAP, "difference": 0.08}], ["difference of logits"]),
        ([LIKE_SWAP, {**SWAP, "compiled": 1}], ["graphs compiled by swaps"]),
        ([LIKE_SWAP, {**SWAP, "back_is_same": False}], ["back is same"]),
        ([LIKE_SWAP, {**SWAP, "swapped_ms": [11, 40, 11, 5, 5, 5, 5]}], ["slow steps, swapped"]),
        ([LIKE_SWAP, {**SWAP, "back_ms": [11, 5, 5, 5]}], ["slow steps, back"]),
        ([{"workload": "prefill8k", "candidate": "ours", "tflop_s": 619.0}], ["TFLOP/s of a pr"]),
    ],
)
def test_limits_are_kept(rows: list[dict[str, Any]], failed: list[str]) -> None:
    from benchmarks import generate

    report = generate.judged({"shape": "llama3-8b", "rows": rows})
    found = [check["what"] for check in report["checks"] if not check["ok"]]
    assert [what[: len(name)] for what, name in zip(found, failed, strict=True)] == failed
    assert report["ok"] is not bool(failed)


def test_parts_are_merged_and_errors_are_not_ok() -> None:
    from benchmarks import generate

    old = {"shape": "llama3-8b", "date": "1", "rows": [{**OURS, "ratio": 1.3}, THEIRS]}
    new = {"shape": "llama3-8b", "date": "2", "rows": [{**OURS, "run": "2"}, LIKE_SWAP, SWAP]}
    both = generate.merged(old, new)
    assert (both["date"], both["ok"]) == ("2", True)
    assert [(row["workload"], row["run"]) for row in both["rows"]] == [
        ("b64x2k", "2"), ("b64x2k", "1"), ("b16x1k", "1"), ("swap", "1"),
    ]  # fmt: skip
    failed = {"workload": "swap", "candidate": "ours", "error": "X: y"}
    assert not generate.merged(both, {**new, "rows": [failed]})["ok"]
