"""Rows of catalogues on models of the packages that backends wrap: only the wrapping can err."""

from __future__ import annotations

import pytest
import torch

from tests.backends import examples
from tests.backends.conftest import _one_thread, flashinfer, forgotten, sgl_kernel
from tests.backends.test_translation import CELLS
from torch_ops.testing.compare import ViolationError

from .kernels import Kernels, RefusedError
from .scenarios import SCENARIOS

__all__ = ["_one_thread", "flashinfer", "forgotten", "sgl_kernel"]


@pytest.mark.parametrize(("backend", "op", "dtype"), CELLS)
def test_rows_of_a_model(backend: str, op: str, dtype: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(backend)
    kernels = Kernels(lambda op: examples.direct(op, backend), torch.device("cpu"))
    served, refused = [], []
    for scenario in SCENARIOS:
        gradient = "N18" in scenario.rows  # of no kernel alone
        if (scenario.op, scenario.dtype) != (op, getattr(torch, dtype)) or gradient:
            continue
        try:
            scenario(kernels)
        except RefusedError as reason:
            refused.append(str(reason))
        except ViolationError as error:
            raise AssertionError(str(scenario)) from error
        else:
            served.append(str(scenario))
    assert served or not refused, refused
