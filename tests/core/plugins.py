"""Installs the distributions of ``tests/plugins`` into a folder, as a wheel's installer does."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "plugins"
GROUP = "torch_ops.backends"


def copy_source(name: str, target: Path) -> None:
    """Copy a distribution's source tree, so that a build leaves nothing in it."""
    shutil.copytree(SOURCES / name, target, ignore=shutil.ignore_patterns("__pycache__"))


def install(name: str, target: Path) -> str:
    """Copy a distribution's packages and write its metadata; gives ``"name version"``."""
    project = tomllib.loads((SOURCES / name / "pyproject.toml").read_text())
    title, version = project["project"]["name"], project["project"]["version"]
    for package in project["tool"]["setuptools"]["packages"]:
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SOURCES / name / package, target / package, ignore=skip)
    info = target / f"{title.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: {version}\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    entries = project["project"]["entry-points"][GROUP]
    lines = [f"[{GROUP}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return f"{title} {version}"
