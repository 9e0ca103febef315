"""A backend from another distribution; serves rms_norm and silu_and_mul."""

from __future__ import annotations


def available() -> str | None:
    return None
