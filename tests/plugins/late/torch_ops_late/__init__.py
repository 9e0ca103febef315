"""A backend that can be imported and compiles at its first use, which may fail.

Tests say what fails in `broken` (names of what is built), and count in `built`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from torch_ops.once import once

broken: dict[str, Exception] = {}
built: collections.Counter[str] = collections.Counter()


def module(name: str) -> Callable[[], None]:
    """Give what is built under a name."""

    def build() -> Callable[[], None]:
        built[name] += 1
        if name in broken:
            raise broken[name]
        return lambda: None

    return once(("late", name), f"late's {name}", build)
