"""Every kernel that may run on this GPU is proven: bound, laws and contract, dtype by dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_ops.declarations import catalogue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(580),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]
# Kernels that do another thing than their op in every dtype, as their `supports` says. They are
# registered so that `explain` names the reason. Nothing else may refuse all examples of an op.
OTHER_CONTRACTS = {
    ("fused_add_rms_norm", "flashinfer"),
    ("fused_add_rms_norm_", "flashinfer"),
    ("gelu_tanh_and_mul", "flashinfer"),
    ("gemma_fused_add_rms_norm", "flashinfer"),
    ("gemma_fused_add_rms_norm", "sgl_kernel"),
    ("gelu_tanh_and_mul", "sgl_kernel"),
    ("merge_state", "flashinfer"),
    ("merge_state", "sgl_kernel"),
    ("topk_softmax", "sgl_kernel"),
}
# It reads both caches as one, which no example of the kit has: `test_sgl_kernel_latents` proves it.
OF_ONE_CACHE = {("mla_decode", "sgl_kernel")}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    from benchmarks import proof

    return proof.run("dev")


def test_every_kernel_is_proven(report: dict[str, Any]) -> None:
    from benchmarks import proof

    red = [cell for cell in report["cells"] if cell["verdict"] in proof.RED]
    if red:
        pytest.fail(proof.table({**report, "cells": red}), pytrace=False)


def test_every_kernel_but_those_of_other_contracts_serves_some_dtype(
    report: dict[str, Any],
) -> None:
    kernels = {(cell["op"], cell["backend"]) for cell in report["cells"]}
    proven = {
        (cell["op"], cell["backend"]) for cell in report["cells"] if cell["verdict"] == "passed"
    }
    assert kernels - proven == (OTHER_CONTRACTS | OF_ONE_CACHE) & kernels
    assert {op for op, _ in proven} == set(catalogue())
    assert {op for op, backend in proven if backend == "triton"} == set(catalogue())
