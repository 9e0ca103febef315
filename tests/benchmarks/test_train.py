"""``python -m benchmarks train``: gradients that are right get a time, and what is kept counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled, for a moment."""
    from benchmarks import train

    monkeypatch.setattr(train, "MILLISECONDS", 1)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    ok = all(row["ok"] for row in rows)
    return {"device": "cpu", "versions": {}, "rows": rows, "ok": ok}


def test_every_differentiable_op_is_one_of_its_rows_or_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks import _measure, train
    from torch_ops.declarations import catalogue

    def once(call: Callable[[], Any], *_: object) -> _measure.Spread:
        call()
        return _measure.Spread(1.0, 1.0, 1.0)

    monkeypatch.setattr(_measure, "spread", once)
    able = {op for op, declaration in catalogue().items() if declaration.gradient is not None}
    assert set(train.LEFT_OUT) <= able
    for op in sorted(able - set(train.LEFT_OUT)):
        torch.manual_seed(0)
        row = train._row(op, CPU)
        assert row["near"], op
        assert row["ran"], op


def test_what_is_kept_is_counted_once_and_without_constants() -> None:
    from benchmarks import train

    name, step = train._step("attention", CPU)
    q, k, v = step.args[:3]
    row = train._row("attention", CPU)
    assert (row["name"], row["ok"]) == (name, True)
    kept = sum(t.untyped_storage().nbytes() for t in (q, k, v))
    kept += 4 * q.numel() + 4 * q.shape[0] * q.shape[1] * q.shape[2]  # the result and the LSE
    assert row["cells"]["ours"]["kept"] == kept
    assert train._row("apply_rope", CPU)["cells"]["ours"]["kept"] == 0
    assert row["cells"]["ours"]["us"] > 0
    assert train.table(report(row)).endswith("ok")


def test_wrong_gradients_and_too_much_kept_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import train

    def doubled(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return 2 * torch.nn.functional.silu(gate) * value

    monkeypatch.setitem(train.BY_HAND, "silu_and_mul", doubled)
    row = train._row("silu_and_mul", CPU)
    assert "RED: far off float64" in train.table(report(row))
    monkeypatch.undo()
    sizes = iter((2, 1, 1, 1))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(train, "_kept", lambda call, step: next(sizes))
    assert train.table(report(train._row("silu_and_mul", CPU))).endswith(
        "RED: keeps more than by hand\nNOT OK"
    )
