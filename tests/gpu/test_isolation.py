"""A kernel that loses this GPU is found with its smallest example, and the GPU serves on."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from tests.core import plugins
from torch_ops.testing.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(580),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


def test_an_assertion_on_the_device_is_shrunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    plugins.install("hazard", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel = importlib.import_module("torch_ops_hazard.faults").asserts_on_the_device
    result = verify("silu_and_mul", kernel, device=device, dtypes=("float16", "bfloat16"))
    assert [cell.verdict for cell in result.cells] == ["failed", "passed"]
    assert all("the GPU's context was lost" in failure.detail for failure in result.failures)
    assert json.loads(result.failures[-1].spec)["dims"]["half"] == 33
    assert result.versions["device"] == torch.cuda.get_device_name(device)
    assert int(torch.ones(3, device=device).sum()) == 3
