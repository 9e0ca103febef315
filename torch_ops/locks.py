"""Locks of modules: a process that forks while another thread holds one must not wait for ever."""

from __future__ import annotations

import os
import threading
from typing import Any

__all__ = ["lock", "reentrant"]


def _renewed(made: Any) -> Any:
    os.register_at_fork(after_in_child=made._at_fork_reinit)
    return made


def lock() -> threading.Lock:
    """Make a lock that is free in a forked child. For locks that are kept for ever."""
    made: threading.Lock = _renewed(threading.Lock())
    return made


def reentrant() -> Any:
    """Make a reentrant lock that is free in a forked child. For locks that are kept for ever."""
    return _renewed(threading.RLock())
