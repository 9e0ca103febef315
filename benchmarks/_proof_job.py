"""What a process of `benchmarks.proof` does."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from torch_ops.testing.process import Process
from torch_ops.testing.verify import verify

__all__ = ["work"]


def work(
    answer: Connection,
    op: str,
    backend: str,
    device: str,
    profile: str,
    dtypes: Sequence[str],
    max_classes: int | None,
) -> None:
    """Verify one kernel and send its result as data, or a traceback."""
    torch.set_num_threads(1)
    Process.forks = True
    try:
        result = verify(
            op, backend, device=device, profile=profile, dtypes=dtypes, max_classes=max_classes
        )
        answer.send(result.to_dict())
    except Exception:
        answer.send(traceback.format_exc())
