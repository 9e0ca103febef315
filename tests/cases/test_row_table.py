"""Every row that concerns these ops has a test that carries its id, wherever it has to be tried."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import rows_interpreted
from .row_table import CASES, ELSEWHERE, ROWS

ROOT = Path(__file__).parents[2]
FILES = [
    str(path.relative_to(ROOT))
    for folder, names in (("cases", "test_*.py"), ("testing", "test_rows_*.py"))
    for path in sorted((ROOT / "tests" / folder).glob(names))
]


def rows_of(test: str) -> set[str]:
    """Give the rows that a test's name or id carries."""
    name = test.rpartition("::")[2]
    case = re.match(r"test_case_(\d+)_", name)
    if case:
        return {f"case {case[1]}"}
    if not re.match(r"test_(row|t\d)", name):
        return set()
    return {word.upper() for word in re.findall(r"(?<![A-Za-z0-9])[A-Za-z]\d+(?![A-Za-z0-9])",
                                                name.replace("_", " "))}  # fmt: skip


COLLECT = """
import sys, pytest

class Listing:
    def pytest_collection_finish(self, session):
        for item in session.items:
            print("gpu" if item.get_closest_marker("gpu") else "cpu", item.nodeid)

sys.exit(pytest.main(["--collect-only", "-qq", *sys.argv[1:]], plugins=[Listing()]))
"""


@pytest.fixture(scope="module")
def collected() -> dict[str, set[str]]:
    """Rows of tests that need a GPU, and of those that don't."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *FILES],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    found: dict[str, set[str]] = {"gpu": set(), "cpu": set()}
    for line in done.stdout.splitlines():
        where, _, test = line.partition(" ")
        if where in found:
            found[where] |= rows_of(test)
    return found


@pytest.mark.parametrize("row", [*ROWS, *(f"case {number}" for number in CASES)])
def test_every_row_is_tried_where_it_has_to_be(collected: dict[str, set[str]], row: str) -> None:
    runs = (ROWS.get(row) or CASES[row.removeprefix("case ")]).runs
    assert row in collected["cpu"], "no test of this row runs without a GPU"
    if "G" in runs:
        assert row in collected["gpu"], "no test of this row runs on a GPU"
    if "T" in runs:
        tried = {name for scenario in rows_interpreted.tried() for name in scenario.rows}
        assert row in tried, "no test of this row runs in Triton's interpreter"


def test_no_test_is_of_an_unknown_row(collected: dict[str, set[str]]) -> None:
    known = {*ROWS, *(f"case {number}" for number in CASES)}
    assert collected["cpu"] | collected["gpu"] <= known
    assert not known & ELSEWHERE.keys()


def test_a_row_is_read_from_names_and_ids() -> None:
    assert rows_of("a/test_b.py::test_row_A1_A7_no_tokens[silu_and_mul]") == {"A1", "A7"}
    assert rows_of("a/test_b.py::test_row_on_a_gpu[T1-T2-merge_state-float16-torch]") == {
        "T1",
        "T2",
    }
    assert rows_of("a/test_b.py::TestNumerics::test_t9_rows[torch_math]") == {"T9"}
    assert rows_of("a/test_b.py::test_case_22_cold[rms_norm]") == {"case 22"}
    assert rows_of("a/test_b.py::test_of_row_N1") == set()
