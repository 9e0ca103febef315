"""The support matrix: which kernel may run where, for which dtype, and what that rests on.

It asks the selector's own predicates on simulated platforms, as if every optional package were
there: what is installed here makes no difference.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ops import discovery, selector
from torch_ops.backend import Backend
from torch_ops.declarations import catalogue
from torch_ops.errors import TorchOpsError
from torch_ops.platform import Platform, Requirement, rejection
from torch_ops.registry import registry
from torch_ops.spec import KernelSpec

__all__ = ["Cell", "Evidence", "evidence", "markdown", "matrix"]

PLATFORMS = {
    "cpu": (Platform.cpu(),),
    "cuda": tuple(Platform.cuda(capability) for capability in ((8, 0), (9, 0), (10, 0))),
    "rocm": (Platform.rocm("gfx942"), Platform.rocm("gfx950")),
}
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "h200.json"
BUILT_IN = "torch_ops.backends."
CPU_KIT, INTERPRETER, COMPILED, UNVERIFIED = "CPU kit", "interpreter", "compiled only", "unverified"
Evidence = Mapping[str, Any]
_DTYPE = re.compile(r"dtype torch\.\w+")
_HEAD = """\
# Support

Which kernel may run where, for which dtypes of the inputs, and what shows that it is right. Made by
`torch-ops matrix --markdown > SUPPORT.md` from the predicates that choose kernels; a test compares.

| evidence | meaning |
|---|---|
| CPU kit | `torch-ops verify` proves it on a CPU; the tests do, for `inductor` for some ops |
| interpreter | Triton's interpreter runs it on a CPU, in tests; it isn't chosen there |
| H200 and a date | `python -m benchmarks proof` proved it on that GPU on that day |
| compiled only | compiled for the platform's architectures, in tests; it wasn't run |
| unverified | it may run, and nothing here has shown that it is right |
| no | it can't run, and why; else all dtypes of the op have the same evidence |
| no kernel | why a package that could run there doesn't serve the op |

"on request" means that no declared order names the backend there: it runs where it is chosen.
"""


@dataclass(frozen=True)
class Cell:
    """One op, backend, platform and dtype.

    Attributes:
        usable: Whether the kernel may run there, as far as can be told without the arguments.
        evidence: What shows that it is right there, or why it can't run.
    """

    op: str
    backend: str
    platform: str
    dtype: str
    usable: bool
    evidence: str


def evidence(path: Path | None = None) -> Evidence:
    """Read the proofs of a GPU: verdicts by op, backend and dtype, each with its date.

    Raises:
        TorchOpsError: a file that was named can't be read.
    """
    chosen = path or RESULTS
    if path is None and not chosen.exists():  # installed without the repository
        return {}
    try:
        data = json.loads(chosen.read_text())
        return {**data["proof"]["ops"], "": data["machine"].removeprefix("NVIDIA ")}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise TorchOpsError(
            f"evidence {chosen} can't be read: {type(error).__name__}: {error}"
        ) from error


def matrix(
    proofs: Evidence, ops: Sequence[str] | None = None, *, plugins: bool = False
) -> list[Cell]:
    """Give a cell for every declared op and each of its backends, platforms and dtypes.

    Backends that say why they don't serve an op come behind those that do.

    Args:
        proofs: What `evidence` read.
        ops: Names of ops; all where None.
        plugins: Whether also the backends of other distributions that are installed here.
    """
    cells = []
    for op, declaration in catalogue().items():
        if ops is not None and op not in ops:
            continue
        specs = sorted(registry.get(op), key=lambda spec: _place(spec, declaration.order))
        dtypes = [str(dtype).removeprefix("torch.") for dtype in declaration.dtypes]
        cells += [
            _cell(spec, platform, dtype, proofs)
            for spec in specs
            if plugins or spec.target.startswith(BUILT_IN)
            for platform in PLATFORMS
            for dtype in dtypes
        ]
        cells += [
            Cell(op, package.name, platform, dtype, False, _declined(package, op, platform))
            for package in discovery.packages().values()
            if op in package.declined and (plugins or package.module.startswith(BUILT_IN))
            for platform in PLATFORMS
            for dtype in dtypes
        ]
    return cells


def _declined(package: discovery.BackendPackage, op: str, platform: str) -> str:
    """Say why a package serves an op nowhere, or not there."""
    elsewhere = _elsewhere(package.requires, platform)
    return elsewhere or f"no kernel: {package.declined[op]}"


def _place(spec: KernelSpec, order: Mapping[str, Sequence[str]]) -> tuple[int, str]:
    name = spec.backend.value
    return min((o.index(name) for o in order.values() if name in o), default=99), name


def _cell(spec: KernelSpec, platform: str, dtype: str, proofs: Evidence) -> Cell:
    shown = _elsewhere(spec.requires, platform)
    usable = shown is None
    interpreted = platform == "cpu" and spec.backend is Backend.TRITON
    if usable or interpreted:
        shown = _refusal(spec, dtype)
        usable = shown is None and not interpreted
    if shown is None:
        shown = _evidence(spec, platform, dtype, proofs)
        order = selector.order_of(spec.op, PLATFORMS[platform][0]) or ()
        if usable and spec.backend.value not in order:
            shown += ", on request"
    return Cell(spec.op, spec.backend.value, platform, dtype, usable, shown)


def _elsewhere(requires: frozenset[Requirement], platform: str) -> str | None:
    """Give why a kernel can run on none of the platform's architectures, or None."""
    reasons = [rejection(requires, place) for place in PLATFORMS[platform]]
    return None if None in reasons else f"no: {reasons[0]}".partition(" (device is")[0]


def _refusal(spec: KernelSpec, dtype: str) -> str | None:
    """Give why the kernel's predicate takes no call of a dtype, asked about small named calls."""
    reasons: list[str | None] = []
    for args in _small(spec.op, dtype):
        reasons += selector.call_reasons(spec, args) or (None,)
        if None in reasons:
            return None
    if not reasons:
        return None
    return f"no: {_DTYPE.sub('dtype', str(reasons[0])).replace('torch.', '')}"


@functools.lru_cache(maxsize=16)
def _small(op: str, dtype: str) -> tuple[tuple[Any, ...], ...]:
    """Make arguments of an op's small named calls, of zeros on the CPU.

    Predicates look at no data, and ask for no GPU.
    """
    from torch_ops.testing.proof import proof_names, proof_of
    from torch_ops.tuner.shapes import zeros

    if op not in proof_names():
        return ()
    proof = proof_of(op)
    return tuple(zeros(proof, spec, "cpu") for spec in proof.small_named(dtype))


def _evidence(spec: KernelSpec, platform: str, dtype: str, proofs: Evidence) -> str:
    """Say what shows that a kernel is right on a platform."""
    own = spec.backend is Backend.TRITON
    if platform == "cpu":
        if own:
            return INTERPRETER if dtype in ("float16", "float32") else UNVERIFIED
        return CPU_KIT if _small(spec.op, dtype) else UNVERIFIED
    found = proofs.get(spec.op, {}).get(spec.backend.value, {}).get(dtype)
    if platform == "rocm" or found is None or found["verdict"] == "unsupported":
        return COMPILED if own else UNVERIFIED
    where = f"{proofs['']} {found['date']}"
    return where if found["verdict"] == "passed" else f"{found['verdict']} on the {where}"


def markdown(cells: Sequence[Cell]) -> str:
    """Write the page: a table for each op, a row for each backend, a column for each platform."""
    lines = [_HEAD]
    for op in dict.fromkeys(cell.op for cell in cells):
        lines += [f"## {op}", "", f"| backend | {' | '.join(PLATFORMS)} |"]
        lines.append("|---" * (1 + len(PLATFORMS)) + "|")
        own = [cell for cell in cells if cell.op == op]
        for backend in dict.fromkeys(cell.backend for cell in own):
            row = [_together(own, backend, platform) for platform in PLATFORMS]
            lines.append(f"| `{backend}` | {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


def _together(cells: Sequence[Cell], backend: str, platform: str) -> str:
    """Name the dtypes that have the same evidence, where not all of them have."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        if (cell.backend, cell.platform) == (backend, platform):
            found.setdefault(cell.evidence.replace("|", "\\|"), []).append(cell.dtype)
    if len(found) == 1:
        return next(iter(found))
    return "<br>".join(f"{', '.join(dtypes)}: {shown}" for shown, dtypes in found.items())
