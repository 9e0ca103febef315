"""Fixtures of the core's tests: foreign backends, and processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import torch_ops
from torch_ops import binding, declare, policy

from . import plugins
from .toy import PACKAGE, Toy, hidden_toy

Install = Callable[..., dict[str, str]]
Python = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install distributions of ``tests/plugins`` into this process until the test ends."""
    site = tmp_path / "site"

    def installer(*names: str) -> dict[str, str]:
        site.mkdir(exist_ok=True)
        labels = {name: plugins.install(name, site) for name in names}
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(str(site))
        torch_ops.refresh()
        return labels

    yield installer
    monkeypatch.undo()
    for name in [name for name in sys.modules if _belongs(name, site)]:
        del sys.modules[name]
    torch_ops.refresh()


def _belongs(name: str, site: Path) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return bool(file) and Path(str(file)).is_relative_to(site)


@pytest.fixture
def declaring() -> Iterator[None]:
    """Take ops that a test declares out of the catalogue again; their operators stay for ever."""
    before = set(declare.declared)
    yield
    for name in set(declare.declared) - before:
        del declare.declared[name]
        delattr(torch_ops.ops, name)
    policy.invalidate()


@pytest.fixture
def strangers() -> Iterator[None]:
    """Let every call look new, before a test and after it."""
    policy.invalidate()
    yield
    policy.invalidate()


@pytest.fixture(scope="session")
def _toy_declaration() -> tuple[declare.Declaration, object]:
    return hidden_toy()


@pytest.fixture
def toy(_toy_declaration: tuple[declare.Declaration, object], restored: None) -> Iterator[Toy]:
    """An op without kernels, to which the test adds some; gone after the test."""
    declaration, function = _toy_declaration
    declare.declared["toy"] = declaration
    vars(torch_ops.ops)["toy"] = function
    binding._logged.clear()
    policy.invalidate()
    yield Toy()
    del declare.declared["toy"]
    del vars(torch_ops.ops)["toy"]
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    policy.invalidate()


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Run a script in a process of its own and give what it prints; it has to succeed."""

    def run(script: str, *names: str, path: Path | None = None, **env: str) -> str:
        site = path or tmp_path / "other-site"
        site.mkdir(exist_ok=True)
        for name in names:
            plugins.install(name, site)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_OPS_")}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=clean | {"PYTHONPATH": str(site)} | env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
