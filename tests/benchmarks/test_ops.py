"""``python -m benchmarks ops``: right kernels get times, wrong ones none, and it ends in time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .specs import small

OPS = ["attention", "rms_norm"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small call an op, and nothing that compiles."""
    from benchmarks import _calls

    monkeypatch.setattr(_calls, "named", lambda op, dtype: {"tiny": small(op)})
    monkeypatch.setattr(_calls, "names_of", lambda op: ["eager", "torch", "selected"])


def _replace(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> None:
    """Put another kernel in the place of the backend ``torch``."""
    from benchmarks import _calls

    ask = _calls.candidates

    def candidates(*args: Any) -> list[_calls.Candidate]:
        return [
            dataclasses.replace(each, call=kernel) if each.name == "torch" else each
            for each in ask(*args)
        ]

    monkeypatch.setattr(_calls, "candidates", candidates)


def test_right_kernels_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import ops

    report = ops.run(op=OPS, dtype=["bfloat16"])
    assert report["ok"], ops.table(report)
    assert report["copy_tb_s"] > 0
    assert [(row["op"], row["unit"]) for row in report["rows"]] == [
        ("attention", "TFLOP/s"),
        ("rms_norm", "GB/s"),
    ]
    for row in report["rows"]:
        assert row["selected"] == row["best"] == "torch"
        assert row["cells"]["torch"]["ratio"] == 1
        for cell in row["cells"].values():
            assert 0 < cell["low_us"] <= cell["us"] <= cell["high_us"]
            assert 0 < cell["error"] <= 1
            amount = row["bytes"] / 1e3 if row["flops"] is None else row["flops"] / 1e6
            assert cell["rate"] == pytest.approx(amount / cell["us"], rel=1e-3)
    text = ops.table(report)
    assert "rms_norm: us and GB/s" in text
    assert text.endswith("\nok")


def _one_percent(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps) * 1.01


def _unwritten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.full_like(x, torch.nan)


def _writes_its_input(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
    x[0, 0] += 1
    return out


def _raises(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    raise RuntimeError("a kernel that fails")


def _no_memory(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    raise torch.OutOfMemoryError("tried to allocate 1 PiB")


def _loses_the_gpu(*_: object) -> Tensor:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_nothing_is_measured_on_a_lost_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import ops

    _replace(monkeypatch, _loses_the_gpu)
    report = ops.run(op=["rms_norm", "silu_and_mul"], dtype=["bfloat16"])
    assert not report["ok"]
    (row,) = report["rows"]
    states = {name: (cell["state"], cell["red"]) for name, cell in row["cells"].items()}
    assert states == {
        "eager": ("late", False), "torch": ("failed", True), "selected": ("late", False),
    }  # fmt: skip
    assert "an illegal memory access" in row["cells"]["torch"]["reason"]
    (left_out,) = report["not_measured"]
    assert left_out.startswith("silu_and_mul tiny bfloat16: the GPU was lost: supports() accepted")
    assert "torch FAILED: " in ops.table(report)


@pytest.mark.parametrize(
    ("kernel", "state", "reason"),
    [
        (_one_percent, "wrong", "of its bound"),
        (_unwritten, "wrong", "wrong class of value"),
        (_writes_its_input, "wrong", "x: an input changed"),
        (_raises, "failed", "a kernel that fails"),
    ],
)
def test_wrong_kernels_get_no_time(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor], state: str, reason: str
) -> None:
    from benchmarks import ops

    _replace(monkeypatch, kernel)
    report = ops.run(op=["rms_norm"], dtype=["bfloat16"])
    assert not report["ok"]
    (row,) = report["rows"]
    cell = row["cells"]["torch"]
    assert (cell["state"], cell["red"]) == (state, True)
    assert reason in cell["reason"]
    assert "us" not in cell
    assert row["best"] is None
    assert all("us" in row["cells"][name] for name in ("eager", "selected"))
    assert f"torch {state.upper()}: " in ops.table(report)
    assert ops.table(report).endswith("NOT OK")


def test_a_reference_too_large_for_the_memory_is_not_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits of a long attention don't fit: no time, said so, and no fault of a kernel."""
    from benchmarks import ops

    _replace(monkeypatch, _no_memory)
    report = ops.run(op=["rms_norm"], dtype=["bfloat16"])
    assert report["ok"]
    assert "us" not in report["rows"][0]["cells"]["torch"]
    assert "torch memory: " in ops.table(report)
    monkeypatch.setattr(ops, "REFERENCES", ("eager",))
    assert not ops.run(op=["rms_norm"], dtype=["bfloat16"])["ok"]


def test_what_an_oracle_raises_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import ops

    def broken(*_: object) -> None:
        raise ValueError("no oracle")

    monkeypatch.setattr(ops, "expected_of", broken)
    report = ops.run(op=["rms_norm"], dtype=["bfloat16"])
    assert not report["ok"]
    assert {cell["reason"] for cell in report["rows"][0]["cells"].values()} == {
        "ValueError: no oracle"
    }


def test_it_stops_in_time_and_lists_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import _measure, ops

    def endless(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(_measure, "copy_rate", lambda _: 1.0)
    monkeypatch.setattr(_measure, "spread", endless)
    report = ops.run(op=OPS, dtype=["bfloat16"], seconds=1)
    assert report["seconds"] < 3
    assert not report["ok"], "nothing was measured"
    (row,) = report["rows"]
    assert {cell["state"] for cell in row["cells"].values()} == {"late"}
    assert report["not_measured"] == ["rms_norm tiny bfloat16: not reached within 0.5 s"]
    assert "rms_norm tiny bfloat16: not reached" in ops.table(report)


def test_large_calls_are_left_out_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import _calls, ops

    large = small("rms_norm", tokens=1 << 20)
    monkeypatch.setattr(_calls, "named", lambda op, dtype: {"large": large})
    left_out: list[str] = []
    jobs = list(ops._jobs(["rms_norm"], ["bfloat16"], torch.device("cpu"), left_out))
    assert jobs == []
    assert left_out == ["rms_norm large bfloat16: too large for a CPU, of 33.6 MB"]
    assert len(list(ops._jobs(["rms_norm"], ["bfloat16"], torch.device("cuda"), left_out))) == 1


def test_ops_without_a_call_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import _calls, ops

    monkeypatch.setattr(_calls, "named", lambda op, dtype: {})
    left_out: list[str] = []
    asked = ["rms_norm", "of_nobody"], ["bfloat16", "int8"]
    assert list(ops._jobs(*asked, torch.device("cpu"), left_out)) == []
    assert left_out == [
        "of_nobody: it has no proof",
        "rms_norm bfloat16: no named call",
        "rms_norm int8: not a dtype of the op",
    ]


def test_the_command_saves_json_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import __main__ as command
    from benchmarks import _plots

    path = tmp_path / "results" / "ops.json"
    words = ["ops", "--op", "rms_norm", "--dtype", "bfloat16", "--json", "--save", str(path)]
    assert command.main(words) == 0
    report = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == report
    drawn = path.with_name("ops-rms_norm.svg")
    assert [file.name for file in sorted(path.parent.iterdir())] == [drawn.name, "ops.json"]
    text = drawn.read_text()
    assert "TB/s" in text
    assert "date" not in text
    _plots.draw(report, "rms_norm", tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text
