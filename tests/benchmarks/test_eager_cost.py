"""``python -m benchmarks eager_cost``: what it compares is the same work."""

from __future__ import annotations

import pytest
import torch

import torch_ops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    from benchmarks import eager_cost

    monkeypatch.setattr(eager_cost, "ROUNDS", 3)
    monkeypatch.setattr(eager_cost, "GRAPH_ROUNDS", 3)


def test_the_chosen_kernel_is_called_directly() -> None:
    from benchmarks import eager_cost

    args = eager_cost.arguments_of(CPU)["rms_norm"]
    with torch_ops.use_backend(rms_norm="torch"):
        backend, kernel = eager_cost.chosen("rms_norm", args)
    assert backend == "torch"
    assert kernel is torch_ops.get_kernel("rms_norm", "torch")


@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm", "apply_rope_"])
def test_chains_of_an_op_and_of_its_kernel_agree(op: str) -> None:
    from benchmarks import _plain, eager_cost
    from torch_ops.declarations import catalogue

    plain = _plain.define(f"{op}_compared", catalogue()[op], torch_ops.get_kernel(op, "torch"))
    torch.manual_seed(0)
    ours = eager_cost.arguments_of(CPU)[op]
    theirs = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in ours)
    before = ours[0].clone()
    found = eager_cost.chain(getattr(torch.ops.torch_ops, op))(*ours)
    expected = eager_cost.chain(plain)(*theirs)
    assert torch.equal(found[0], expected[0])
    assert not torch.equal(found[0], before)


def test_rows_are_judged_and_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import eager_cost

    kept = {"rms_norm": eager_cost.arguments_of(CPU)["rms_norm"]}
    monkeypatch.setattr(eager_cost, "arguments_of", lambda _: kept)
    monkeypatch.setattr(eager_cost, "LIMIT_US", 1e6)
    monkeypatch.setattr(eager_cost, "LIMIT_RATIO", 1e6)
    threads = torch.get_num_threads()
    try:
        report = eager_cost.run()
    finally:
        torch.set_num_threads(threads)
    assert report["ok"]
    assert [row["mode"] for row in report["eager"]] == ["inference_mode", "no_grad"]
    for row in report["eager"]:
        assert list(row["over_us"]) == ["operator", "callable"]
        assert row["over_us"]["callable"] < row["over_us"]["operator"] + row["direct_us"]
    (compiled,) = report["compiled"]
    assert compiled["ratio"] == pytest.approx(compiled["op_us"] / compiled["direct_us"], rel=1e-2)
    monkeypatch.setattr(eager_cost, "LIMIT_RATIO", 0.0)
    assert not eager_cost._compiled("rms_norm", CPU)["ok"]
    assert eager_cost.table(report).count("rms_norm") == 3
    report["eager"][0] |= {"ok": False, "over_us": {"operator": 2e6, "callable": 1.0}}
    assert "OVER operator\n" in eager_cost.table(report)
