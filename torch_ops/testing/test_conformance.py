"""`pytest --pyargs torch_ops.testing --torch-ops-backend NAME`: one test for every op."""

import contextlib
import logging
from collections.abc import Iterator

import pytest

from torch_ops.testing.conformance import Case
from torch_ops.testing.verify import verify


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Keeps PyTorch's traces of compiled graphs, hundreds of empty records, off pytest's report."""
    logger = logging.getLogger("torch.__trace")
    captured = [h for h in logger.handlers if type(h).__module__ == "_pytest.logging"]
    for handler in captured:
        logger.removeHandler(handler)
    try:
        yield
    finally:
        for handler in captured:
            logger.addHandler(handler)


def test_conformance(torch_ops_case: Case, pytestconfig: pytest.Config) -> None:
    """The backend's kernel is proven on this machine."""
    with _untraced():
        result = verify(
            torch_ops_case.op,
            torch_ops_case.backend,
            device=pytestconfig.getoption("--torch-ops-device"),
            profile=pytestconfig.getoption("--torch-ops-profile"),
        )
    if not result.ok:
        pytest.fail(str(result), pytrace=False)
