"""A backend that makes one promise, withdraws another, and keeps to what it says."""

from __future__ import annotations

batch_invariant = ("rms_norm",)
deterministic = {"rms_norm"}


def available() -> str | None:
    return None
