"""Every kernel that may run on this GPU is proven: bound, laws and contract, dtype by dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(560),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    from benchmarks import proof

    return proof.run("dev")


def test_every_kernel_is_proven(report: dict[str, Any]) -> None:
    from benchmarks import proof

    assert report["kernels"]
    red = [verdict for verdict in report["kernels"] if not verdict["ok"]]
    if red:
        pytest.fail(proof.table({**report, "kernels": red}), pytrace=False)
