"""The scenarios use the fixtures of the core's tests."""

from __future__ import annotations

from tests.core.conftest import _toy_declaration, declaring, install, python, toy

__all__ = ["_toy_declaration", "declaring", "install", "python", "toy"]
