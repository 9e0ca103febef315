"""``python -m benchmarks grid``: calls of models, and how the selected kernel does."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _calls, grid
from torch_ops.testing.proof import proof_of
from torch_ops.tuner import shapes
from torch_ops.tuner.models import MODELS

from .specs import small


def _row(call: str, **us: float) -> dict[str, Any]:
    return {"call": call, "cells": {name: {"us": time} for name, time in us.items()}}


def test_the_grid_has_calls_of_every_model_in_both_phases() -> None:
    jobs = grid.jobs("cuda")
    assert len(jobs) >= grid.LIMITS["cells"]
    assert len({str(job) for job in jobs}) == len(jobs)
    for model in MODELS:
        named = [job.name for job in jobs if job.name.startswith(f"{model}, ")]
        assert {f"{model}, 1 tokens", f"{model}, {grid.PROMPT} tokens"} <= set(named)


def test_calls_of_a_cpu_are_of_a_megabyte_and_more() -> None:
    jobs = grid.jobs("cpu")
    assert {job.op for job in jobs} == set(grid.CPU_OPS)
    assert min(map(grid._bytes, jobs)) >= 1 << 20


def test_the_calls_are_those_of_the_file_for_the_tuner(tmp_path: Path) -> None:
    report = grid.run(shapes=tmp_path / "shapes.json")
    jobs = grid.jobs("cpu")
    assert report["cells"] == len(jobs)
    for op, dtype in itertools.product(grid.CPU_OPS, grid.CPU_DTYPES):
        read = shapes.of_file(tmp_path / "shapes.json", op, dtype)
        assert read == [job.spec for job in jobs if (job.op, job.dtype) == (op, dtype)]
        buckets = {shapes.bucket_of(proof_of(op), spec) for spec in read}
        assert len(buckets) == len(read)  # each is tuned


def test_the_selected_kernel_is_compared() -> None:
    rows = [
        _row("a", eager=8.0, triton=2.0, flashinfer=4.0, selected=2.0),
        _row("b", eager=3.0, triton=3.0, flashinfer=1.0, selected=2.0),
        _row("c", eager=9.0, selected=1.0),  # no backend has a time
        _row("d", triton=1.0),
    ]
    found = grid.summary(rows, "cuda")
    assert found["cells"] == 2
    assert found["over_best"] == {
        "cells": 2, "mean": 1.4142, "least": 1.0, "of_least": "a", "worst": 2.0, "of_worst": "b",
    }  # fmt: skip
    assert found["flashinfer"]["mean"] == 1.0
    assert found["eager"]["least"] == 1.5
    assert [text.partition(":")[0] for text in found["over"]] == [
        "b", "geometric mean", "2 cells (limit 80)",
        "flashinfer alone takes 1.000 of the time (limit 1.15)",
        "sgl_kernel alone takes 0.000 of the time (limit 1.15)",
    ]  # fmt: skip


def test_a_kernel_slower_than_eager_is_over_its_limit() -> None:
    rows = [_row("a", eager=1.0, triton=2.0, selected=2.0)]
    assert any("eager PyTorch takes 0.500" in text for text in grid.summary(rows, "cuda")["over"])
    assert grid.summary(rows, "cpu")["over"] == [
        "eager PyTorch takes 0.500 of the time (limit 2.0)"
    ]
    rows = [_row("a", eager=2.0, triton=1.0, selected=1.0)]
    assert grid.summary(rows, "cpu")["over"] == []


def test_a_report_is_shown_drawn_and_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = [_calls.Job("rms_norm", "bfloat16", f"tiny {n}", small("rms_norm", n)) for n in (2, 4)]
    monkeypatch.setattr(grid, "jobs", lambda device: jobs)
    monkeypatch.setattr(_calls, "names_of", lambda op: ["eager", "torch", "selected"])
    report = grid.run()
    assert report["summary"]["cells"] == 2
    assert report["ok"] == (not report["summary"]["over"])
    json.dumps(report)
    shown = grid.table(report)
    assert "selected over the best: mean" in shown
    assert all(f"OVER: {text}" in shown for text in report["summary"]["over"])
    (drawn,) = grid.save(report, tmp_path / "grid.json")
    assert "rms_norm tiny 4 bfloat16" in drawn.read_text()
