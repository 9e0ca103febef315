"""The table of all proofs: how work is split, what one run tells, how runs of parts add up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import _proof_job, proof
from torch_ops.declarations import catalogue
from torch_ops.testing.search import dtypes_of


def cell(op: str, dtype: str, verdict: str = "passed", **more: Any) -> dict[str, Any]:
    return {
        "op": op, "backend": "torch", "dtype": dtype, "verdict": verdict, "reason": "",
        "executed": 100, "laws": {"rerun": 3}, "date": "2026-01-01T00:00:00+00:00",
        "profile": "dev", "versions": {"torch": "2.0"}, **more,
    }  # fmt: skip


def report(*cells: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "benchmark": "proof", "torch": "2.0", "device": "cpu", "profile": "dev", "seconds": 9.0,
        "cells": list(cells), "refused": {}, "ok": True, **more,
    }  # fmt: skip


def test_what_takes_longest_comes_first_and_is_split() -> None:
    usable = [("silu_and_mul", "torch"), ("silu_and_mul", "inductor"), ("attention", "triton")]
    found = proof.jobs(usable, proof.DTYPES, {})
    assert [str(job) for job in found] == [
        "silu_and_mul/inductor bfloat16",
        "silu_and_mul/inductor float16",
        "silu_and_mul/inductor float32",
        "attention/triton bfloat16",
        "attention/triton float16",
        "attention/triton float32",
        "silu_and_mul/torch",
    ]
    measured = {("silu_and_mul", "torch", dtype): 200.0 for dtype in proof.DTYPES}
    measured |= {("silu_and_mul", "inductor", dtype): 5.0 for dtype in proof.DTYPES}
    assert [str(job) for job in proof.jobs(usable, proof.DTYPES, measured)][2:] == [
        "silu_and_mul/torch float32",
        "attention/triton bfloat16",
        "attention/triton float16",
        "attention/triton float32",
        "silu_and_mul/inductor",
    ]


def test_every_job_proves_every_dtype_once() -> None:
    usable = [(op, backend) for op in catalogue() for backend in ("torch", "inductor", "triton")]
    proven = [(j.op, j.backend, d) for j in proof.jobs(usable, proof.DTYPES, {}) for d in j.dtypes]
    assert (
        len(proven)
        == len(set(proven))
        == sum(len(set(dtypes_of(op)) & set(proof.DTYPES)) for op, _ in usable)
    )


def test_one_run_tells_of_each_cell_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = proof.run("dev", ["torch"], ["silu_and_mul"], ["float32"])
    (only,) = found["cells"]
    assert (only["verdict"], only["dtype"], only["profile"]) == ("passed", "float32", "dev")
    assert only["executed"] >= 25
    assert only["versions"]["torch"] == torch.__version__
    assert only["date"].endswith("+00:00")
    assert 0 < only["seconds"] < proof.SECONDS
    assert found["ok"]
    assert "silu_and_mul          torch       float32   passed" in proof.table(found)
    for work, reason in ((dies, "exit code 7"), (fails, "it is broken")):
        monkeypatch.setattr(_proof_job, "work", work)
        broken = proof.run("dev", ["torch"], ["silu_and_mul"], ["float32"])
        assert not broken["ok"]
        assert broken["cells"][0]["reason"] == reason


def dies(*_: Any) -> None:
    """Stand for a process that ends without a word."""
    os._exit(7)


def fails(answer: Any, *_: Any) -> None:
    """Stand for a process that sends a traceback."""
    answer.send("it is broken")


def test_what_is_not_begun_in_time_is_red() -> None:
    found = proof.run("dev", ["torch"], ["silu_and_mul"], ["float32"], seconds=0)
    assert not found["ok"]
    assert found["cells"][0]["reason"] == "not begun within 0 s"


def test_runs_of_parts_make_one_table() -> None:
    first = proof.merged({}, report(cell("b", "float32"), cell("b", "float16")))
    assert first["ok"]
    again = report(
        cell("b", "float16", "failed", reason="wrong", seconds=3.0, profile="torch_ops_ci"),
        cell("a", "float32"),
        cell("b", "float32", "failed", reason="not begun within 1 s"),
        profile="torch_ops_ci",
    )
    second = proof.merged(first, again)
    keys = [(c["op"], c["dtype"], c["verdict"]) for c in second["cells"]]
    assert keys == [
        ("a", "float32", "passed"),
        ("b", "float16", "failed"),
        ("b", "float32", "passed"),
    ]
    assert not second["ok"]
    assert [(r["profile"], r["cells"]) for r in second["runs"]] == [("dev", 2), ("torch_ops_ci", 2)]
    for saved in second["cells"]:
        assert {"date", "versions", "profile", "executed"} <= set(saved)
        assert "laws" not in saved
    assert proof.timings(second) == {("b", "torch", "float16"): 3.0}
    assert proof.merged(second, report(cell("b", "float16")))["ok"]


@pytest.mark.parametrize(("name", "value"), [("benchmark", "ops"), ("device", "NVIDIA H200")])
def test_a_table_of_something_else_is_not_added_to(name: str, value: str) -> None:
    old = report(**{name: value})
    with pytest.raises(ValueError, match=rf"--save: the file is of {name} '{value}' \(accepted"):
        proof.merged(old, report(cell("a", "float32")))


def test_the_command_takes_parts_and_saves_them_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prove(job: proof.Job, device: str, profile: str) -> dict[str, Any]:
        cells = [cell(job.op, dtype, profile=profile) for dtype in job.dtypes]
        return {"op": job.op, "backend": job.backend, "cells": cells}

    monkeypatch.setattr(proof, "prove", prove)
    saved = tmp_path / "proof.json"
    part = ["proof", "--backend", "torch", "--save", str(saved)]
    assert (
        program.main([*part, "--op", "rms_norm", "--op", "layer_norm", "--dtype", "float32"]) == 0
    )
    assert program.main([*part, "--op", "silu_and_mul", "--profile", "dev"]) == 0
    whole = json.loads(saved.read_text())
    assert [(c["op"], c["dtype"], c["profile"]) for c in whole["cells"]] == [
        ("layer_norm", "float32", "torch_ops_ci"),
        ("rms_norm", "float32", "torch_ops_ci"),
        ("silu_and_mul", "bfloat16", "dev"),
        ("silu_and_mul", "float16", "dev"),
        ("silu_and_mul", "float32", "dev"),
    ]
    assert "100 examples" in capsys.readouterr().out
    for wrong in (["--op", "rms_nrom"], ["--profile", "fast"], ["--dtype", "float64"]):
        with pytest.raises(SystemExit):
            program.main([*part, *wrong])
    assert "rms_nrom" in capsys.readouterr().err
