"""A kernel that kills its process, hangs or loses the GPU is red at the smallest such example."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ops
from tests.core import plugins
from torch_ops.declarations import catalogue
from torch_ops.registry import registry
from torch_ops.testing import proof_of
from torch_ops.testing.classes import ClassLimit
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.isolation import Isolated, OutOfPatienceError, assignment
from torch_ops.testing.process import DeathError, IsolationError, Patience, Process
from torch_ops.testing.spec import Operand, Spec
from torch_ops.testing.subject import subject_of
from torch_ops.testing.verify import verify
from torch_ops.testing.worker import Channel

OP = "silu_and_mul"
SMALLEST = 33  # a row has twice as many elements, and the faults begin after 64


@pytest.fixture(autouse=True)
def hazard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs the backend 'hazard' until the test ends."""
    plugins.install("hazard", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch_ops.refresh()
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "torch_ops_hazard"]:
        del sys.modules[name]


def _fault(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module("torch_ops_hazard.faults"), name)
    return function


def _spec(half: int, dtype: str = "float16") -> Spec:
    return Spec.of(OP, {"half": half}, {"x": Operand(dtype)})


@contextlib.contextmanager
def _isolated(
    name: str, patience: Patience | None = None, limit: ClassLimit | None = None
) -> Iterator[Isolated]:
    kernel, contract = _fault(name), catalogue()[OP].contract
    process = Process(assignment(OP, kernel), patience or Patience())
    with contextlib.closing(process):
        yield Isolated(Examiner(subject_of(kernel), proof_of(OP), contract, limit=limit), process)


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("leaves", "the process died: exit code 0"),
        (
            "loses_the_gpu",
            "the GPU's context was lost: supports() accepted the call: "
            "AcceleratorError: CUDA error: an illegal memory access",
        ),
        ("writes_past_its_input", "x: an input changed (2 bytes, 2 of them outside its elements)"),
    ],
)
def test_a_fault_is_shrunk(fault: str, detail: str) -> None:
    result = verify(OP, _fault(fault), dtypes=("float16",), isolate=True)
    (cell,) = result.cells
    assert cell.verdict == "failed"
    assert cell.executed > 0
    (failure,) = [f for f in result.failures if f.phase == "generated"]
    assert (failure.layer, failure.detail) == ("contract", detail)
    spec = json.loads(failure.spec)
    assert spec["dims"]["half"] == SMALLEST
    assert spec["operands"]["x"]["layout"] == "contig"
    assert "import torch_ops_hazard.faults; from torch_ops.testing import replay" in failure.again
    assert f"versions: torch {torch.__version__}, python " in str(result)


@pytest.mark.slow
def test_a_registered_kernel_that_crashes_leaves_the_other_cells_alone() -> None:
    result = verify(OP, "hazard", dtypes=("float16", "bfloat16"), isolate=True)
    verdicts = {cell.dtype: cell.verdict for cell in result.cells}
    assert verdicts == {"float16": "failed", "bfloat16": "passed"}
    phases = [f.phase for f in result.failures]
    assert phases == [
        "covering", "named", "classes", "opcheck", "traced", "compiled", "generated",
    ]  # fmt: skip
    assert {f.detail for f in result.failures} == {"the process died: signal SIGSEGV"}
    assert json.loads(result.failures[-1].spec)["dims"]["half"] == SMALLEST


def test_a_hang_is_shrunk_in_bounded_time() -> None:
    started = time.monotonic()
    patience = Patience(first=1, later=0.5, deaths=6)
    result = verify(OP, _fault("hangs"), dtypes=("float16",), isolate=True, patience=patience)
    failure = result.failures[-1]
    assert failure.phase == "generated"
    assert failure.detail.startswith("no answer within ")
    assert json.loads(failure.spec)["dims"]["half"] >= SMALLEST
    assert time.monotonic() - started < 60


def test_a_hang_is_waited_for_once_and_a_dead_process_is_replaced() -> None:
    with _isolated("hangs", Patience(first=2, later=2)) as examine:
        assert examine(_spec(1), Tally()) is not None
        first = examine.process._pid
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(ViolationError, match=r"\[contract\] no answer within 2 s") as seen:
                examine(_spec(SMALLEST), Tally())
            assert seen.value.spec == _spec(SMALLEST).to_json()
        assert time.monotonic() - started < 0.5
        assert examine.deaths == 1
        assert examine(_spec(1), Tally()) is not None
        assert examine.process._pid != first
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)


def test_what_is_known_outlives_the_process() -> None:
    """Classes that a limit admitted, and how many processes died: patience ends with the last."""
    limit, tally = ClassLimit(1), Tally()
    with _isolated("aborts", Patience(deaths=2), limit) as examine:
        assert examine(_spec(1), tally, with_laws=False) is not None
        admitted = set(limit.seen)
        assert len(admitted) == 1
        for half in (40, 35):
            with pytest.raises(ViolationError, match="signal SIGABRT"):
                examine(_spec(half), tally, with_laws=False)
            if half == 40:
                assert examine(_spec(1, "float32"), tally, with_laws=False) is None
        assert (tally.executed, tally.left_out, limit.seen) == (1, 1, admitted)
        with pytest.raises(OutOfPatienceError, match="too many processes died") as end:
            examine(_spec(34), tally)
        assert end.value.last.spec == _spec(35).to_json()


def test_hangs_of_a_cell_end_together() -> None:
    with _isolated("hangs", Patience(first=1, later=0.5, hanging=1.2)) as examine:
        for half in (40, 35):
            with pytest.raises(ViolationError, match="no answer within"):
                examine(_spec(half), Tally())
        with pytest.raises(OutOfPatienceError, match=r"examples that hang took 1\.5 s") as end:
            examine(_spec(34), Tally())
        assert end.value.last.spec == _spec(35).to_json()


@pytest.mark.slow
def test_a_right_kernel_comes_to_the_same() -> None:
    here, there = (verify(OP, "torch", dtypes=("float16",), isolate=i) for i in (False, True))
    assert here.ok
    assert dataclasses.astuple(there.cells[0]) == dataclasses.astuple(here.cells[0])


def test_refusals_are_told_with_reasons_and_prints_are_not_on_stdout(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with _isolated("refuses") as examine:
        tally = Tally()
        assert examine(_spec(1), tally) is not None
        assert examine(_spec(SMALLEST), tally) is None
        assert tally.refused == {"66 elements (supported: 64)": 1}
        assert tally.refused_specs == {_spec(SMALLEST): "66 elements (supported: 64)"}
    out, err = capfd.readouterr()
    assert "no report" not in out
    assert "no report" in err


def test_what_is_no_fault_of_the_kernel_is_raised() -> None:
    with (
        _isolated("answers_wrongly") as examine,
        pytest.raises(IsolationError, match="TypeError: supports: received True, accepted None"),
    ):
        examine(_spec(1), Tally())


def test_what_another_process_cannot_find_is_refused() -> None:
    message = "can't import .*accepted with isolate: a registered backend, or a function of an"
    with pytest.raises(ValueError, match=message):
        verify(OP, lambda x: x, isolate=True)
    spec = torch_ops.KernelSpec(OP, "hazard", "torch_ops_hazard.faults:right")
    registry.unregister(registry.find(OP, "hazard"))
    registry.register(spec)
    message = "backend 'hazard' of op 'silu_and_mul' is registered in one process alone"
    with pytest.raises(ValueError, match=message):
        verify(OP, "hazard", isolate=True, dtypes=("float16",))


def test_a_kernel_that_kills_while_it_is_loaded_is_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "torch_ops_hazard" / "silu_and_mul.py"
    module.write_text("import os\nos._exit(5)\n")
    started: list[str] = []
    monkeypatch.setattr(Process, "_ask", _counted(started))
    result = verify(OP, "hazard", dtypes=("float16", "float32"), isolate=True)
    detail = "the process died: exit code 5, while the kernel was loaded"
    assert {f.detail for f in result.failures} == {detail}
    assert [cell.verdict for cell in result.cells] == ["failed", "failed"]
    assert started == ["hello"]


def _counted(started: list[str]) -> Callable[..., Any]:
    ask = Process._ask

    def counted(process: Process, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        started.append(request["do"])
        return ask(process, request, seconds)

    return counted


_IMPORTS = """
import torch
def touched(*args):
    raise RuntimeError("touched")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = touched
import torch_ops.testing.worker
from torch_ops.testing.proof import proofs
list(proofs())
"""


def test_what_is_imported_before_the_fork_touches_no_gpu() -> None:
    """A GPU that was touched before a fork can't be used after it."""
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True)


@pytest.mark.parametrize("line", [b"counters", b"3", b"\xff"])
def test_what_a_kernel_writes_into_the_pipe_is_its_fault(line: bytes) -> None:
    process = Process(assignment(OP, _fault("right")), Patience())
    channel = process._channel = Channel(*os.pipe())
    os.write(channel.outgoing, line + b"\n")
    with pytest.raises(DeathError, match=re.escape(f"wrote {line!r} into a file that isn't its")):
        process._message(time.monotonic() + 1)
    os.close(channel.incoming)
    os.close(channel.outgoing)


def test_patience_is_positive() -> None:
    with pytest.raises(ValueError, match=r"Patience: received .*later=0.*accepted positive"):
        Patience(later=0)


_PARENT = """
import sys
from torch_ops.testing.isolation import Isolated, assignment
from torch_ops.testing.process import Patience, Process
from torch_ops_hazard.faults import hangs
Process.forks = sys.argv[3] == "forked"
process = Process(assignment("silu_and_mul", hangs), Patience())
ask = {"most": None, "admitted": [], "spec": sys.argv[1], "laws": False}
process.ask({"do": "opcheck", **ask, "spec": sys.argv[2]})
print(process._pid, process._process.pid, flush=True)
process.ask({"do": "example", **ask})
"""


@pytest.mark.parametrize("start", ["forked", "anew"])
def test_nothing_outlives_a_killed_parent(start: str, tmp_path: Path) -> None:
    """Not even a kernel that hangs: a driver of proofs kills what takes too long."""
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    specs = [_spec(half).to_json() for half in (SMALLEST, 1)]
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, *specs, start],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.3)
        parent.kill()
    deadline = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, pids))


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
