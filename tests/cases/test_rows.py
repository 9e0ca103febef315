"""Rows of catalogues about single kernels, on every kernel of every op that they concern.

A test's id begins with the row's. The reference has them on the CPU, Triton's kernels in Triton's
interpreter, and all that a GPU has on it, where the largest tensors have 2^31 elements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_ops.testing.compare import ViolationError

from . import (
    faults_attention,
    faults_experts,
    faults_fused_experts,
    faults_paged,
    faults_quantization,
    faults_rows,
    faults_sampling,
    rows_interpreted,
)
from .fault import Fault
from .kernels import RefusedError, backends_of, of_backend, of_function
from .scenarios import SCENARIOS, Scenario

FAULTS = [
    *faults_rows.FAULTS,
    *faults_attention.FAULTS,
    *faults_paged.FAULTS,
    *faults_quantization.FAULTS,
    *faults_sampling.FAULTS,
    *faults_experts.FAULTS,
    *faults_fused_experts.FAULTS,
]
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_row_of_the_reference(scenario: Scenario) -> None:
    scenario(of_backend("torch", torch.device("cpu")))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_row_finds_the_fault(fault: Fault) -> None:
    with pytest.raises(ViolationError):
        fault.check(of_function(fault.op, fault.function), fault.op, fault.dtype)


def test_every_scenario_has_a_fault_that_it_finds() -> None:
    assert {s.check for s in SCENARIOS} == {fault.check for fault in FAULTS}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """What the interpreter's process found."""
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.cases.rows_interpreted"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", [str(scenario) for scenario in rows_interpreted.tried()])
def test_row_interpreted(interpreted: dict[str, str | None], name: str) -> None:
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.gpu
@pytest.mark.timeout(900)  # FlashInfer may compile
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize(
    ("scenario", "backend"),
    [
        pytest.param(scenario, backend, id=f"{scenario}-{backend}")
        for scenario in SCENARIOS
        for backend in backends_of(scenario.op)
    ],
)
def test_row_on_a_gpu(device: torch.device, scenario: Scenario, backend: str) -> None:
    if scenario.gigabytes:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] >> 30
        if free < scenario.gigabytes:
            pytest.skip(f"{free} GiB of GPU memory are free, {scenario.gigabytes} are needed")
    try:
        scenario(of_backend(backend, device, far=2**31 + 1))
    except RefusedError as reason:
        if backend == "torch":  # the reference takes every call
            raise
        pytest.skip(f"refused: {reason}")
    torch.cuda.synchronize()
