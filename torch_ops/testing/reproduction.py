"""What it takes to see a failure again: a command, and the versions it was seen with."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex

import torch

from torch_ops.testing.subject import Subject

_DISTRIBUTIONS = (
    "triton", "flashinfer-python", "sglang-kernel", "amd-aiter", "hypothesis",
)  # fmt: skip


def command(spec: str, subject: Subject, device: torch.device) -> str:
    """Gives one line of shell that runs an example again, in its own process alone."""
    place = "" if device.type == "cpu" else f", {str(device)!r}"
    before, kernel = "", repr(subject.name)
    if not subject.registered:
        module = getattr(subject.call, "__module__", "")
        path = getattr(subject.call, "__qualname__", "")
        if path.replace(".", "").isidentifier():  # what is made in a function has no address
            before, kernel = f"import {module}; ", f"{module}.{path}"
    code = f"{before}from torch_ops.testing import replay; replay({spec!r}, {kernel}{place})"
    return f"python -c {shlex.quote(code)}"


def device_name(device: torch.device) -> str:
    """Name of a GPU; nothing for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def versions(device: str) -> dict[str, str]:
    """Gives the versions of what takes part, without importing it; those installed alone.

    Args:
        device: Name of the GPU, or nothing.
    """
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
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
