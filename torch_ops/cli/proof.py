"""``verify``: the proof of a backend's kernels, op by op."""

from __future__ import annotations

import torch

import torch_ops
from torch_ops.cli.arguments import UsageError
from torch_ops.cli.output import Report
from torch_ops.demo.progress import Progress
from torch_ops.errors import TorchOpsError, listing
from torch_ops.integrations.extras import require

__all__ = ["report"]


def report(
    op: str | None,
    backend: str,
    device: torch.device,
    profile: str,
    isolate: bool | None = None,
) -> Report:
    """Prove one op of a backend, or all that it serves; red where one isn't proven.

    With `isolate` a kernel runs in a process of its own; None isolates on a GPU.

    Raises:
        UsageError: there is no such profile.
        TorchOpsError: op or backend are unknown, an op has no proof, or a package is missing.
    """
    require("torch-ops verify", ("hypothesis",), "pip install 'torch-ops[test]'")
    from torch_ops.testing.profiles import PROFILES
    from torch_ops.testing.verify import verify

    if profile not in PROFILES:
        raise UsageError(f"--profile {profile!r} is not known (accepted: {', '.join(PROFILES)})")
    ops = _served(backend) if op is None else [_registered(op, backend)]
    _refuse_unproven(ops)
    progress = Progress()
    results = []
    for name in ops:
        with progress.step(f"{name} on {backend}"):
            results.append(
                verify(
                    name,
                    backend,
                    device=device,
                    profile=profile,
                    isolate=isolate,
                    progress=lambda p: progress.note(
                        f"{p.op} {p.dtype}: {p.phase} {p.done} of {p.total}"
                    ),
                )
            )
    ok = all(result.ok for result in results)
    data = {"ok": ok, "results": [result.to_dict() for result in results]}
    return Report(data, [str(result) for result in results], ok)


def _served(backend: str) -> list[str]:
    """List the ops of a backend; one that serves none is unknown."""
    known = sorted({s.backend.value for op in torch_ops.registry.ops() for s in _specs(op)})
    ops = [op for op in torch_ops.registry.ops() if backend in {s.backend for s in _specs(op)}]
    if not ops:
        raise torch_ops.UnknownBackendError(
            f"Backend {backend!r} serves no op. Backends that do: {listing(known)}.",
            backend=backend,
        )
    return ops


def _specs(op: str) -> list[torch_ops.KernelSpec]:
    return torch_ops.registry.get(op)


def _registered(op: str, backend: str) -> str:
    """Raise the error of a call where the op or its backend are unknown."""
    torch_ops.select_kernel(op, backend, unchecked=True)
    return op


def _refuse_unproven(ops: list[str]) -> None:
    from torch_ops.testing.proof import proof_names

    proven = proof_names()
    missing = [op for op in ops if op not in proven]
    if missing:
        raise TorchOpsError(
            f"No proof for {listing(missing)}: each needs a module of its name in "
            f"torch_ops/testing/proofs. There are proofs for {listing(proven)}."
        )
