"""How many graphs the backend compiles."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from torch_ops import ops
from torch_ops.testing.parts import check, expected_of
from torch_ops.testing.proof import proof_of

from . import examples


def test_large_calls_on_a_cpu_are_compiled_for_their_widths(
    monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> None:
    """One graph each of so many widths and eps, whatever the rows; later ones share one."""
    module = examples.part("inductor", "_compiled")
    for name in ("_functions", "_narrow"):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(module, "LARGE", 3 * 64 * 4)
    monkeypatch.setattr(module, "WIDTHS", 2)
    sizes = ((3, 64), (5, 64), (3, 96), (7, 96), (3, 128), (5, 160), (9, 64), (2, 8))
    graphs = []
    for rows, width, eps in (*((*size, 1e-6) for size in sizes), (3, 64, 1.0), (5, 64, 1e-6)):
        args = {"x": torch.randn(rows, width), "weight": torch.randn(width), "eps": eps}
        before = counters["stats"]["unique_graphs"]
        out = ops.rms_norm(*args.values(), backend="inductor")
        graphs.append(counters["stats"]["unique_graphs"] - before)
        check("rms_norm", args, [out], expected_of(proof_of("rms_norm"), args))
    assert graphs == [1, 0, 1, 0, 1, 0, 0, 0, 0, 0]
    monkeypatch.setattr(module, "WIDTHS", 3)
    x = torch.randn(3, 64)
    for eps, made in ((1.0, 1), (1e-6, 0), (1.0, 0)):
        before = counters["stats"]["unique_graphs"]
        args = {"x": x, "weight": torch.randn(64), "eps": eps}
        out = ops.rms_norm(*args.values(), backend="inductor")
        assert counters["stats"]["unique_graphs"] == before + made
        check("rms_norm", args, [out], expected_of(proof_of("rms_norm"), args))
