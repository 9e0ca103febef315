"""A backend that says itself why it can't be used, on devices that aren't here."""

from __future__ import annotations

from torch_ops import Requirement

requires = frozenset({Requirement.cuda(min_arch=(9, 0)), Requirement.rocm(["gfx942"])})


def available() -> str | None:
    return "absent driver 1.0 (needed: 2.0 or newer); update the driver"
