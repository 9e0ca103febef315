"""Packages that a backend wraps: absent, without metadata, too old, too new."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torch_ops.installed import lacking


def asked() -> str | None:
    return lacking("acme_wrapped", "acme-wrapped", "0.6.13", "0.7")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "acme_wrapped.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def describe(site: Path, version: str) -> None:
    info = site / f"acme_wrapped-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: acme-wrapped\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)


def test_absent() -> None:
    assert asked() == (
        "not installed: no module named 'acme_wrapped'; pip install 'acme-wrapped>=0.6.13,<0.7'"
    )


def test_another_way_to_install() -> None:
    reason = lacking("acme_wrapped", "acme-wrapped", "0.6.13", "0.7", "ask acme for a wheel")
    assert reason == "not installed: no module named 'acme_wrapped'; ask acme for a wheel"


def test_blocked(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe(site, "0.6.13")
    monkeypatch.setitem(sys.modules, "acme_wrapped", None)
    assert str(asked()).startswith("not installed: no module named 'acme_wrapped'")


def test_without_metadata(site: Path) -> None:
    assert asked() == (
        "acme-wrapped of unknown version: 'acme_wrapped' has no metadata "
        "(supported: at least 0.6.13, below 0.7)"
    )


@pytest.mark.parametrize("version", ["0.6.13", "0.6.13.post1", "0.6.14+cu130", "0.6.100"])
def test_supported_without_importing_it(site: Path, version: str) -> None:
    describe(site, version)
    assert asked() is None
    assert "acme_wrapped" not in sys.modules


@pytest.mark.parametrize("version", ["0.6.12", "0.5", "0.7.0", "0.7.0.dev1", "1.0", "unknown"])
def test_other_versions(site: Path, version: str) -> None:
    describe(site, version)
    reason = str(asked())
    assert reason.startswith(f"acme-wrapped {version} (supported: at least 0.6.13, below 0.7)")
    assert reason.endswith("; pip install 'acme-wrapped>=0.6.13,<0.7'")
