"""A backend under a name that another distribution has, too."""

from __future__ import annotations


def available() -> str | None:
    return None
