"""The ledger of known faults excuses examples by issue, and nothing else."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops.declarations import catalogue
from torch_ops.testing import ledger
from torch_ops.testing.ledger import NEVER_LAUNCHED, TOLERATED, Entry
from torch_ops.testing.result import Result
from torch_ops.testing.spec import Spec
from torch_ops.testing.verify import verify

OP, BACKEND, ISSUE = "silu_and_mul", "aiter", "project#1234"
Install = Callable[[Callable[[Tensor], Tensor]], None]
reference: Callable[[Tensor], Tensor] = catalogue()[OP].reference


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a function the kernel of a backend that can't run here."""

    def put(kernel: Callable[[Tensor], Tensor]) -> None:
        module = types.ModuleType("faulty_kernels")
        module.kernel = kernel  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "faulty_kernels", module)
        torch_ops.registry.unregister(torch_ops.registry.find(OP, BACKEND))
        torch_ops.register_kernel(torch_ops.KernelSpec(OP, BACKEND, "faulty_kernels:kernel"))

    return put


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes entries into the ledger."""
    return lambda *entries: monkeypatch.setattr(ledger, "LEDGER", entries)


def _entry(kind: str, matches: Callable[[Spec], bool], **changed: str) -> Entry:
    return Entry(**{"op": OP, "backend": BACKEND, "issue": ISSUE, "kind": kind, **changed},
                 matches=matches)  # fmt: skip


def _odd(spec: Spec) -> bool:
    return spec.dim["half"] % 2 == 1


def _wrong_where_odd(x: Tensor) -> Tensor:
    return reference(x) + x.shape[-1] // 2 % 2


def _verify() -> Result:
    return verify(OP, BACKEND, dtypes=("float16",))


def test_the_shipped_ledger_is_consistent() -> None:
    assert ledger.entries_of(OP, "torch") == ()


def test_without_an_entry_a_fault_is_red(install: Install) -> None:
    install(_wrong_where_odd)
    assert not _verify().ok


def test_a_tolerated_fault_is_counted_by_issue(
    install: Install, enter: Callable[..., None]
) -> None:
    install(_wrong_where_odd)
    enter(_entry(TOLERATED, _odd))
    result = _verify()
    assert result.ok, str(result)
    (cell,) = result.cells
    assert list(cell.tolerated) == [ISSUE]
    assert cell.tolerated[ISSUE] > 10
    assert json.loads(json.dumps(result.to_dict()))["cells"][0]["tolerated"] == cell.tolerated
    assert f"float16: {cell.tolerated[ISSUE]} examples tolerated: {ISSUE}" in str(result)
    assert str(result).splitlines()[2].split()[-1] == str(cell.tolerated[ISSUE])


def test_an_entry_excuses_no_other_example(install: Install, enter: Callable[..., None]) -> None:
    install(lambda x: reference(x) + 1)
    enter(_entry(TOLERATED, _odd))
    result = _verify()
    assert not result.ok
    failure = next(f for f in result.failures if f.phase == "generated")
    assert not _odd(Spec.from_json(failure.spec))


def test_an_entry_whose_examples_all_pass_is_stale(
    install: Install, enter: Callable[..., None]
) -> None:
    install(reference)
    enter(_entry(TOLERATED, _odd))
    result = _verify()
    assert not result.ok
    (failure,) = result.failures
    assert (failure.phase, failure.layer) == ("ledger", "ledger")
    assert failure.detail == f"every example of {ISSUE} that ran was right: its entry is stale"
    assert _odd(Spec.from_json(failure.spec))


def test_an_entry_that_concerns_no_example_is_not_stale(
    install: Install, enter: Callable[..., None]
) -> None:
    install(reference)
    enter(_entry(TOLERATED, lambda spec: False))
    assert _verify().ok


def test_what_would_crash_is_never_launched(install: Install, enter: Callable[..., None]) -> None:
    seen = set()

    def crashing(x: Tensor) -> Tensor:
        seen.add(x.shape[-1] // 2 % 2 if x.numel() else 0)
        return reference(x)

    install(crashing)
    wide = _entry(NEVER_LAUNCHED, _odd)
    enter(wide, _entry(TOLERATED, _odd, issue="project#2"))
    result = _verify()
    assert result.ok, str(result)
    assert seen == {0}
    (cell,) = result.cells
    assert cell.never_launched[ISSUE] > 10
    assert not cell.tolerated
    assert f"examples never launched: {ISSUE}" in str(result)


def test_a_cell_that_is_excused_whole_is_no_proof(
    install: Install, enter: Callable[..., None]
) -> None:
    install(lambda x: torch.zeros_like(reference(x)))
    enter(_entry(TOLERATED, lambda spec: True))
    result = _verify()
    assert not result.ok
    assert result.cells[0].verdict == "too few"


def test_a_plain_callable_has_no_ledger(enter: Callable[..., None], install: Install) -> None:
    install(reference)
    enter(_entry(TOLERATED, lambda spec: True))

    def aiter(x: Tensor) -> Tensor:
        return reference(x) + 1

    result = verify(OP, aiter, dtypes=("float16",))
    assert result.failures[0].layer == "bound"
    assert not result.cells[0].tolerated


@pytest.mark.parametrize("issue", ["", "a known fault", "#12", "flashinfer#", "flashinfer#12 and"])
def test_an_entry_needs_an_issue(issue: str) -> None:
    with pytest.raises(ValueError, match=r"ledger: issue: received .*, accepted 'project#number'"):
        _entry(TOLERATED, _odd, issue=issue)


def test_an_entry_is_of_one_of_two_kinds() -> None:
    with pytest.raises(ValueError, match="ledger: kind: received 'skipped', accepted 'tolerated'"):
        _entry("skipped", _odd)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"op": "nope"}, "ledger: project#1234: op 'nope' is not declared"),
        ({"op": "merge_state"}, "ledger: project#1234: op 'merge_state' has no backend 'aiter'"),
        ({"backend": "nope"}, "ledger: project#1234: op 'silu_and_mul' has no backend 'nope'"),
    ],
)
def test_an_entry_is_of_a_kernel_that_exists(
    enter: Callable[..., None], changed: dict[str, str], message: str
) -> None:
    enter(_entry(TOLERATED, _odd, **changed))
    with pytest.raises(LookupError, match=message):
        verify(OP, "torch", dtypes=("float16",))
