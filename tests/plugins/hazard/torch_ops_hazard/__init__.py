"""A backend whose kernel kills its process, and functions that do so in other ways."""

from __future__ import annotations


def available() -> str | None:
    return None
