"""``python -m benchmarks compile``: contenders agree, and a small run goes through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import torch_ops

CPU = torch.device("cpu")


def test_authors_agree() -> None:
    """Each computes the same chain and block; what is rounded differs by a rounding or two."""
    from benchmarks import compile as benchmark

    size = benchmark.Size(6, 4, 2, 16, 24)
    for case, args in benchmark.arguments_of(size, CPU).items():
        results = {}
        for author, ops in benchmark.contenders(CPU).items():
            made = benchmark.chain(ops) if case == "chain" else benchmark.block(ops, size)
            results[author] = made(*args)
        for author in ("custom_op", "define_impl", "opaque", "inlined"):
            torch.testing.assert_close(results[author], results["native"], rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("fresh_dynamo", "one_thread")
def test_a_small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import compile as benchmark
    from benchmarks.__main__ import main

    monkeypatch.setattr(benchmark, "LENGTH", 2)
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    monkeypatch.setattr(benchmark, "LIMITS", dict.fromkeys(benchmark.LIMITS, 1e6))
    monkeypatch.setattr(benchmark, "SIZES", {"cpu": benchmark.Size(6, 4, 2, 16, 24)})
    made = benchmark.arguments_of
    monkeypatch.setattr(benchmark, "arguments_of", lambda *a: {"chain": made(*a)["chain"]})
    path = tmp_path / "compile.json"
    assert main(["compile", "--device", "cpu", "--save", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["ok"]
    assert [(row["case"], row["mode"]) for row in report["rows"]] == [("chain", "default")]
    for row in report["rows"]:
        kernels, us = row["kernels"], row["us"]
        assert set(us) == {"native", "custom_op", "define_impl", "opaque", "inlined"}
        assert all(time > 0 for time in us.values())
        assert kernels["inlined"] == kernels["native"] >= 1
        assert kernels["opaque"] == kernels["define_impl"] <= kernels["native"]
    assert not torch_ops.inlining._process
