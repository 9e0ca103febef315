"""`warmup` and `refresh`: what happens before calls, never inside one."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from torch_ops import discovery, dynamo, kernels, once, policy
from torch_ops.backend import Backend
from torch_ops.errors import CaptureError, UnknownOpError
from torch_ops.platform import forget_probes
from torch_ops.selector import require_op

__all__ = ["refresh", "warmup"]

_log = logging.getLogger(__name__)


def refresh() -> None:
    """Read the environment and look for entry points, packages and devices anew.

    Kernels whose import failed are tried again. An error in the environment is raised by the
    next resolution.
    """
    forget_probes()
    kernels.forget_failures()
    discovery.rescan()
    policy.forget_environment()


def warmup(op: str, *args: Any, backend: Backend | str | None = None) -> None:
    """Load, compile and launch the kernel that a call would run, so that the call needn't.

    Tensors are cloned, so a mutating op leaves the arguments as they are.

    Args:
        op: Name of a declared op.
        *args: The call's arguments.
        backend: Explicit choice, strict.

    Raises:
        UnknownOpError: the op isn't declared.
        CaptureError: a stream is capturing.
        TorchOpsError: whatever the call itself would raise.
    """
    from torch_ops.declarations import catalogue

    if torch.compiler.is_dynamo_compiling() or dynamo.traced_otherwise() or once.capturing():
        raise CaptureError(
            f"warmup of op {op!r}: a stream is capturing or code is being traced; "
            "call it before the capture"
        )
    require_op(op)
    declaration = catalogue().get(op)
    if declaration is None:
        raise UnknownOpError(f"warmup: op {op!r} is only registered, not declared", op=op)
    bound = declaration.signature.bind(*args)
    bound.apply_defaults()
    cloned = [arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in bound.args]
    packet = getattr(torch.ops.torch_ops, op)
    start = time.perf_counter()
    with torch.no_grad():
        if backend is None:
            packet.default(*cloned)
        else:
            packet.backend(*cloned, backend.value if isinstance(backend, Backend) else backend)
    if any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in cloned):
        torch.cuda.synchronize()
    _log.info("warmup of op %r took %.2f s", op, time.perf_counter() - start)
