"""What it takes to see a failure again: a command, what it runs, and the versions there were."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_ops import discovery
from torch_ops.backend import Backend
from torch_ops.declarations import catalogue
from torch_ops.testing.arguments import build
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.proof import proof_of
from torch_ops.testing.registered import subject_for
from torch_ops.testing.spec import Spec
from torch_ops.testing.subject import Subject

OPERATOR_CHECKS = ("opcheck", "traced", "compiled")

_DISTRIBUTIONS = (
    "torch-ops", "triton", "flashinfer-python", "sglang-kernel", "amd-aiter", "hypothesis",
)  # fmt: skip


def command(spec: str, subject: Subject, device: torch.device, check: str = "") -> str:
    """Gives one line of shell that runs an example again, in its own process alone.

    Args:
        spec: The example as JSON.
        subject: The kernel; for one that no other process finds, the line is one of Python.
        device: Where it ran.
        check: The check of the operator that failed, if one did.
    """
    address = ("", repr(subject.name)) if subject.registered else _address(subject.call)
    before, kernel = address or ("", "kernel")
    place = "" if device.type == "cpu" else f", {str(device)!r}"
    place += f", check={check!r}" if check else ""
    code = f"{before}from torch_ops.testing import replay; replay({spec!r}, {kernel}{place})"
    if address is None:
        return f"where {subject.name!r} is made, as kernel: {code}"
    return f"python -c {shlex.quote(code)}"


def _address(function: Callable[..., Any]) -> tuple[str, str] | None:
    """How another process comes to a function: statements and an expression; None if it can't."""
    module, path = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    value: Any = sys.modules.get(module)
    for name in path.split("."):
        value = getattr(value, name, None)
    if value is not function:
        return None
    if module != "__main__":
        return f"import {module}; ", f"{module}.{path}"
    script = getattr(sys.modules[module], "__file__", None)
    if script is None:
        return None  # a shell or a notebook
    first, _, rest = path.partition(".")
    return "import runpy; ", f"runpy.run_path({str(Path(script).resolve())!r})[{first!r}]" + (
        f".{rest}" if rest else ""
    )


def device_name(device: torch.device) -> str:
    """Name of a GPU; nothing for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def versions(device: str, backend: str = "") -> dict[str, str]:
    """Gives the versions of what takes part, without importing it; those installed alone.

    Args:
        device: Name of the GPU, or nothing.
        backend: The backend whose distribution takes part, or nothing.
    """
    package = discovery.packages().get(backend)
    own = dict(label.rsplit(" ", 1) for label in package.distributions) if package else {}
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        **own,
    }
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    accelerator = torch.version.cuda or torch.version.hip
    if device and accelerator:
        found["cuda" if torch.version.cuda else "hip"] = accelerator
        found["device"] = device
    return found


def replay(
    spec: str,
    backend: str | Backend | Callable[..., Any],
    device: str = "cpu",
    *,
    check: str | None = None,
) -> float:
    """Runs one example, given as JSON, and returns its largest error as a part of the bound.

    Args:
        spec: The example.
        backend: As for `verify`.
        device: Where to run.
        check: Check the operator of a registered backend instead, which gives 0: ``opcheck``,
            ``traced`` or ``compiled``.

    Raises:
        ViolationError: The kernel broke a promise.
        ValueError: The kernel refuses the example, the JSON is no Spec, or there is no such check.
    """
    example = Spec.from_json(spec)
    place, proof = torch.device(device), proof_of(example.op)
    subject = subject_for(example.op, backend, place)
    contract = subject.under(catalogue()[example.op].contract)
    examiner, tally = Examiner(subject, proof, contract, place), Tally()
    if check is None:
        seen = examiner(example, tally)
        refused = "; ".join(tally.refused)
    else:
        _refuse_check(check, subject)
        seen = 0.0 if examiner.operator(example, check) else None
        refused = str(subject.refuses(tuple(build(example, place).values())))
    if seen is None:
        msg = f"replay: {subject.name} refuses the example: {refused}"
        raise ValueError(msg)
    return seen


def _refuse_check(check: str, subject: Subject) -> None:
    if check not in OPERATOR_CHECKS:
        msg = f"replay: check: received {check!r}, accepted {[*OPERATOR_CHECKS]} or None"
        raise ValueError(msg)
    if not subject.registered:
        msg = f"replay: check: received {check!r} for {subject.name!r}, accepted for a backend"
        raise ValueError(msg)
