"""Fixtures of the attention tests: backends from other distributions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import torch_ops
from torch_ops.attention import AttentionBackend

from . import support

SCRIPTED = Path(__file__).resolve().parents[1] / "plugins" / "scripted" / "torch_ops_scripted"
Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install backends from other distributions into this process until the test ends."""
    site = tmp_path / "site"
    site.mkdir()
    known = set(AttentionBackend._members)
    monkeypatch.syspath_prepend(str(site))

    def installer(name: str, files: dict[str, str], **names: str) -> str:
        label = support.distribution(site, name, files, **names)
        torch_ops.refresh()
        return label

    yield installer
    monkeypatch.undo()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(site)):
            del sys.modules[name]
    torch_ops.refresh()
    support.forget_members(known)


@pytest.fixture
def script(install: Install) -> Any:
    """The script of the backend ``scripted``, which is installed."""
    files = {path.name: path.read_text() for path in SCRIPTED.glob("*.py")}
    install("scripted", files)
    return importlib.import_module("torch_ops_scripted.attention").script
