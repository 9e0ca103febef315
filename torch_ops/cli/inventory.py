"""What is installed: ``info`` and ``list``. Imports no kernel."""

from __future__ import annotations

import importlib.metadata
import platform as host
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

import torch_ops
from torch_ops import discovery, kernels, selector
from torch_ops.cli.output import Report, Table
from torch_ops.declarations import catalogue
from torch_ops.errors import nearest

__all__ = ["info", "ops"]

_PACKAGES = (
    "torch-ops",
    "torch",
    "triton",
    "flashinfer-python",
    "sglang-kernel",
    "transformers",
    "hypothesis",
)


def info() -> Report:
    """Gather the platforms, backends and versions of this machine."""
    platforms = [_platform(device) for device in _devices()]
    backends = [_backend(backend) for backend in torch_ops.Backend]
    versions = _versions()
    parts = (
        Table(
            "Platforms",
            ("device", "arch", "name"),
            [(p["device"], p["arch"] or "-", p["name"]) for p in platforms],
        ),
        Table(
            "Backends",
            ("name", "from", "usable", "ops", "states", "why not, and remarks"),
            [_backend_row(b) for b in backends],
        ),
        Table("Versions", ("package", "version"), [(k, v or "-") for k, v in versions.items()]),
    )
    return Report({"platforms": platforms, "backends": backends, "versions": versions}, parts)


def _devices() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _platform(device: str) -> dict[str, Any]:
    found = torch_ops.Platform.detect(device)
    return {"device": found.device, "arch": found.arch, "index": found.index, "name": found.name}


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": host.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _backend(backend: torch_ops.Backend) -> dict[str, Any]:
    package = discovery.package(backend)
    specs = [
        spec
        for op in torch_ops.registry.ops()
        for spec in torch_ops.registry.get(op)
        if spec.backend is backend
    ]
    reasons = _reasons(package, specs)
    states = Counter(kernels.state(spec) for spec in specs)
    return {
        "name": backend.value,
        "distributions": list(package.distributions) if package else [],
        "usable": not reasons,
        "reasons": reasons,
        "ops": [spec.op for spec in specs],
        "states": dict(sorted(states.items())),
        "remarks": _remarks(package),
    }


def _remarks(package: discovery.BackendPackage | None) -> list[str]:
    """Name public modules that no op has the name of: a misspelt one serves nothing."""
    if package is None:
        return []
    known = torch_ops.registry.ops()
    idle = sorted(name for name in package.modules if name[0] != "_" and name not in known)
    return [f"module {name!r} has the name of no op.{nearest(name, known)}" for name in idle]


def _reasons(
    package: discovery.BackendPackage | None, specs: Sequence[torch_ops.KernelSpec]
) -> list[str]:
    """Give why none of the kernels can run on any device of this machine; none if one can."""
    if not specs:
        problem = package and (package.problem or package.unavailable)
        return [problem or ("serves no op" if package else "no installed package provides it")]
    verdicts = [
        selector.static_reasons(spec, torch_ops.Platform.detect(device))
        for spec in specs
        for device in _devices()
    ]
    if not all(verdicts):
        return []
    return list(dict.fromkeys(reason for verdict in verdicts for reason in verdict))


def _backend_row(backend: dict[str, Any]) -> tuple[str, ...]:
    return (
        backend["name"],
        ", ".join(backend["distributions"]) or "-",
        "yes" if backend["usable"] else "no",
        str(len(backend["ops"])),
        ", ".join(f"{state} {count}" for state, count in backend["states"].items()) or "-",
        "; ".join([*backend["reasons"], *backend["remarks"]]),
    )


def ops() -> Report:
    """Gather every op: schema, backends, first line of its documentation."""
    declared = catalogue()
    found: list[dict[str, Any]] = []
    for name in sorted({*declared, *torch_ops.registry.ops()}):
        declaration = declared.get(name)
        found.append(
            {
                "name": name,
                "schema": f"{name}{declaration.schema}" if declaration else None,
                "backends": [spec.backend.value for spec in torch_ops.registry.get(name)],
                "doc": declaration.doc.strip().partition("\n")[0] if declaration else None,
            }
        )
    rows = [
        (o["name"], ", ".join(o["backends"]) or "-", (o["schema"] or "-").removeprefix(o["name"]))
        for o in found
    ]
    return Report({"ops": found}, (Table("Ops", ("op", "backends", "schema"), rows),))
