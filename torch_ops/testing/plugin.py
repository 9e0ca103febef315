"""pytest options of the kit: which backends `pytest --pyargs torch_ops.testing` proves.

Boundary: loaded in every pytest session, so it imports neither torch nor hypothesis itself.
"""

from __future__ import annotations

import pytest

CASE = "torch_ops_case"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("torch_ops", "proofs of torch_ops backends")
    group.addoption(
        "--torch-ops-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="prove this backend; may be given several times",
    )
    group.addoption(
        "--torch-ops-device",
        default="cpu",
        metavar="DEVICE",
        help="where kernels run (default: cpu)",
    )
    group.addoption(
        "--torch-ops-profile",
        default="torch_ops_ci",
        metavar="PROFILE",
        help="how much: dev, torch_ops_ci, nightly or soak (default: torch_ops_ci)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives the conformance test one case for every op of every backend asked for."""
    if CASE not in metafunc.fixturenames:
        return
    from torch_ops.testing.conformance import cases, refuse_unknown

    option = metafunc.config.getoption
    refuse_unknown(option("--torch-ops-profile"), option("--torch-ops-device"))
    found = cases(option("--torch-ops-backend"))
    metafunc.parametrize(CASE, found, ids=[f"{case.op}-{case.backend}" for case in found])
