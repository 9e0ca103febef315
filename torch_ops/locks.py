"""Locks of modules: a process that forks while another thread holds one must not wait for ever."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["lock", "reentrant"]

_made: weakref.WeakSet[Any] = weakref.WeakSet()


def _renew() -> None:
    for made in list(_made):
        made._at_fork_reinit()


os.register_at_fork(after_in_child=_renew)


def lock() -> threading.Lock:
    """Make a lock that is free in a forked child."""
    made = threading.Lock()
    _made.add(made)
    return made


def reentrant() -> Any:
    """Make a reentrant lock that is free in a forked child."""
    made = threading.RLock()
    _made.add(made)
    return made
