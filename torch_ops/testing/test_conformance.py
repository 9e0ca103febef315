"""`pytest --pyargs torch_ops.testing --torch-ops-backend NAME`: one test for every op."""

import pytest

from torch_ops.testing.conformance import Case
from torch_ops.testing.verify import verify


def test_conformance(torch_ops_case: Case, pytestconfig: pytest.Config) -> None:
    """The backend's kernel is proven on this machine."""
    result = verify(
        torch_ops_case.op,
        torch_ops_case.backend,
        device=pytestconfig.getoption("--torch-ops-device"),
        profile=pytestconfig.getoption("--torch-ops-profile"),
    )
    if not result.ok:
        pytest.fail(str(result), pytrace=False)
