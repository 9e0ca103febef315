"""``python -m benchmarks latents``: right kernels get times, wrong ones none."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import _calls


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference alone, for a moment."""
    from benchmarks import _measure, latents

    monkeypatch.setattr(_measure, "copy_rate", lambda device: 1.0)
    monkeypatch.setattr(_calls, "names_of", lambda op: ["torch", "selected"])
    monkeypatch.setattr(latents, "TURN_MILLISECONDS", 1)


def test_right_kernels_are_timed() -> None:
    from benchmarks import latents

    report = latents.run()
    assert report["ok"], latents.table(report)
    (row,) = report["rows"]
    for cell in row["cells"].values():
        assert cell["tb_s"] == pytest.approx(2 * 9 * 576 / cell["us"] / 1e6)
        assert cell["tflop_s"] == pytest.approx(2 * 4 * 9 * 1088 / cell["us"] / 1e6)
    assert latents.table(report).endswith("ok")


def test_wrong_values_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import latents
    from torch_ops.declarations import catalogue

    reference: Any = catalogue()["mla_decode"].reference
    monkeypatch.setattr(_calls, "kernel_of", lambda op, backend: lambda *a: reference(*a) + 0.1)
    report = latents.run()
    (row,) = report["rows"]
    assert row["cells"]["torch"]["red"]
    assert "us" not in row["cells"]["torch"]
    assert "us" in row["cells"]["selected"]
    assert not report["ok"]
    assert "RED" in latents.table(report)
