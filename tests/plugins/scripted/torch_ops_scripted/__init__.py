"""A backend that does what a test's script says; three families of attention kernels."""

from __future__ import annotations

attention_backends = ("scripted_one", "scripted_two", "scripted_three")


def available() -> str | None:
    return None
