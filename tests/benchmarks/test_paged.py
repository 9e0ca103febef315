"""``python -m benchmarks paged``: right kernels get times, wrong ones none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import _calls


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference alone, for a moment."""
    from benchmarks import paged

    monkeypatch.setattr(_calls, "names_of", lambda op: ["torch", "selected"])
    monkeypatch.setattr(paged, "TURN_MILLISECONDS", 1)


def _replace(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    monkeypatch.setattr(_calls, "kernel_of", lambda op, backend: kernel)


def test_right_kernels_are_timed() -> None:
    from benchmarks import paged

    report = paged.run(only="paged")
    assert report["ok"], paged.table(report)
    ops = ["paged_decode", "paged_prefill", "append_paged_kv_"]
    assert [row["op"] for row in report["rows"]] == ops
    for row in report["rows"]:
        for cell in row["cells"].values():
            assert 0 < cell["low_us"] <= cell["us"] <= cell["high_us"]
            assert cell["tb_s"] == pytest.approx(row["bytes"] / cell["us"] / 1e6)
    assert paged.table(report).endswith("ok")


@pytest.mark.parametrize(("op", "error"), [("paged_decode", 0.1), ("paged_prefill", torch.nan)])
def test_wrong_values_are_red(monkeypatch: pytest.MonkeyPatch, op: str, error: float) -> None:
    from benchmarks import paged
    from torch_ops.declarations import catalogue

    reference = catalogue()[op].reference
    _replace(monkeypatch, lambda *args: reference(*args) + error)
    _red(paged.run(only=op), paged)


def test_an_append_to_other_slots_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import paged
    from torch_ops.declarations import catalogue

    reference = catalogue()["append_paged_kv_"].reference
    _replace(monkeypatch, lambda *args: reference(*args[:4], args[4] + 1))
    _red(paged.run(only="append"), paged)


def _red(report: dict[str, Any], paged: Any) -> None:
    (row,) = report["rows"]
    assert row["cells"]["torch"]["red"]
    assert "us" not in row["cells"]["torch"]
    assert "us" in row["cells"]["selected"]
    assert not report["ok"]
    assert "RED" in paged.table(report)


def test_a_reference_out_of_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import paged

    def exhaust(*args: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 128.00 GiB")

    _replace(monkeypatch, exhaust)
    report = paged.run(only="paged_decode")
    cell = report["rows"][0]["cells"]["torch"]
    assert not cell["red"]
    assert "128.00 GiB" in cell["reason"]
    assert report["ok"]
