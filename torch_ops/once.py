"""What a kernel loads or compiles at its first use: made once, its failure kept and explained.

A backend calls `once` before it starts anything, so that a failure leaves nothing half done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from torch_ops import locks
from torch_ops.errors import CaptureError, TorchOpsError

__all__ = [
    "KernelLoadError",
    "capturing",
    "fail",
    "failure",
    "forget_failures",
    "load_failure",
    "once",
    "shortened",
]

T = TypeVar("T")
_log = logging.getLogger(__name__)
_lock = locks.lock()
_locks: dict[Hashable, threading.RLock] = {}
_made: dict[Hashable, object] = {}
_failures: dict[Hashable, str] = {}
_TEXT = 2000
_LOAD_FAILURES = (
    "driver version is insufficient",
    "no kernel image is available",
    "device kernel image is invalid",
    "compiled with an unsupported toolchain",
    "invalid device function",
    "named symbol not found",
)
"""How the CUDA runtime says that it can't load a kernel's code; nothing has been launched then."""


class KernelLoadError(TorchOpsError, RuntimeError):
    """A kernel's code can't be loaded or compiled at its first use; nothing has started.

    For backends: the core keeps it until ``refresh()``, raises `BackendUnavailableError` where
    the backend was asked for, and goes on to the next one where nobody chose.
    """


def once(key: Hashable, what: str, build: Callable[[], T]) -> T:
    """Give what ``build`` returned for this key; threads that come meanwhile wait for it.

    Args:
        key: Names the thing in this process, ``("flashinfer", "norm")``.
        what: Names it in messages, ``"FlashInfer's module norm"``.
        build: Imports, loads or compiles it, and starts no kernel.

    Raises:
        KernelLoadError: ``build`` raised, now or at an earlier call since the last ``refresh()``.
        CaptureError: it isn't there yet, and a stream of this thread is capturing.
    """
    if key in _made:
        return _made[key]  # type: ignore[return-value]
    with _lock:
        lock = _locks.setdefault(key, locks.reentrant())
    with lock:
        if key in _made:
            return _made[key]  # type: ignore[return-value]
        if key in _failures:
            raise KernelLoadError(_failures[key])
        if capturing():
            raise CaptureError(
                f"{what} isn't loaded, and a stream is capturing; prepare first: call the op, or "
                "torch_ops.warmup(op, ...), before the capture"
            )
        try:
            made = build()
        except Exception as error:
            fail(key, f"{what}: {type(error).__name__}: {shortened(str(error))}")
            raise KernelLoadError(_failures[key]) from error
        _made[key] = made
        return made


def fail(key: Hashable, reason: str) -> None:
    """Keep why something can't be made, until ``refresh()``."""
    _failures[key] = reason
    _log.info("failed at its first use: %s", reason)


def failure(key: Hashable) -> str | None:
    """Give why something couldn't be made, or None."""
    return _failures.get(key)


def forget_failures() -> None:
    """Let what failed be tried again."""
    _failures.clear()


def load_failure(error: BaseException) -> str | None:
    """Give the reason if the error says that a kernel's code can't be loaded, else None."""
    if isinstance(error, KernelLoadError):
        return str(error)
    text = str(error)
    if any(phrase in text for phrase in _LOAD_FAILURES):
        return f"{type(error).__name__}: {shortened(text)}"
    return None


def capturing() -> bool:
    """Whether this thread's current stream is being captured into a CUDA graph.

    Never so where this process hasn't initialised CUDA, as a forked one can't.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def shortened(text: str) -> str:
    """Keep beginning and end: a compiler's output can be megabytes, its error comes last."""
    half = _TEXT // 2
    return text if len(text) <= _TEXT else f"{text[:half]} [...] {text[-half:]}"
