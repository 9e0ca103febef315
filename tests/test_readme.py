"""Every code block of the README runs, in the order of the page, against a copy of the tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

import torch_ops
from torch_ops import environment

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILE = re.compile(r"# ((?:torch_ops|backends|torch_ops_acme)/\S+\.py)\n")


class Block(NamedTuple):
    language: str
    text: str

    @property
    def path(self) -> str | None:
        """The file that the block is, by its first line."""
        named = FILE.match(self.text)
        return named.group(1) if named else None


BLOCKS = [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)]
COMMANDS = [line for b in BLOCKS if b.language == "sh" for line in b.text.splitlines() if line]
KINDS = {
    "make": re.compile(r"make \w+$"),
    "pip": re.compile(r"pip install "),
    "run": re.compile(r"(?:TORCH_OPS_\w+=\S+ )?(?:torch-ops|pytest) "),
}

DRIVER = """
import json, sys
scope = {"__name__": "__main__"}
for number, block in enumerate(json.load(sys.stdin), 1):
    exec(compile(block, f"README.md, python block {number}", "exec"), scope)
"""


def test_every_block_has_a_language_that_is_run() -> None:
    assert len(BLOCKS) == README.count("```") // 2
    assert {block.language for block in BLOCKS} == {"python", "sh", "toml"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH: this tree with the README's files added, and the README's plugin."""
    home = tmp_path_factory.mktemp("site")
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "torch_ops", home / "torch_ops", ignore=skip)
    shutil.copytree(ROOT / "backends", home / "torch_ops" / "backends", ignore=skip)
    for block in BLOCKS:
        if block.path is not None:
            inside = re.sub("^backends/", "torch_ops/backends/", block.path)
            target = home / inside
            assert not target.exists(), f"the README would replace {block.path}"
            target.parent.mkdir(exist_ok=True)
            target.write_text(block.text)
    (plugin,) = (tomllib.loads(block.text) for block in BLOCKS if block.language == "toml")
    for project in (PROJECT["project"], plugin["project"]):
        install_metadata(home, project)
    return home


def install_metadata(home: Path, project: dict[str, object]) -> None:
    """Write what pip would write about a distribution: name, version, entry points."""
    name, version = str(project["name"]).replace("-", "_"), project["version"]
    info = home / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["entry-points"]
    assert isinstance(groups, dict)
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in groups.items()
        )
    )


def environment_with(site: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_OPS_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return kept | {"PYTHONPATH": str(site), "PATH": path}


@pytest.mark.slow
def test_python_blocks_run(site: Path, tmp_path: Path) -> None:
    blocks = [b.text for b in BLOCKS if b.language == "python" and b.path is None]
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:torch_ops", "-c", DRIVER],
        input=json.dumps(blocks),
        cwd=tmp_path,
        env=environment_with(site),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"^# (\w+: \[\w+/\w+\])", README, re.M)
    assert told
    assert [line for line in told if line not in done.stdout] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if KINDS["run"].match(c)])
def test_commands_run(command: str, site: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=tmp_path,
        env=environment_with(site),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    if "--json" in command:
        json.loads(done.stdout)


@pytest.mark.parametrize("command", [c for c in COMMANDS if KINDS["make"].match(c)])
def test_make_commands_are_targets(command: str) -> None:
    """They set up an environment or run this very suite, so make says what it would run."""
    done = subprocess.run(
        [*command.split(), "--dry-run", "--no-print-directory"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = {
        "make demo": ".venv/bin/torch-ops demo",
        "make test": (
            '.venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not exhaustive"'
        ),
    }
    assert done.stdout.splitlines()[-1] == runs[command]


@pytest.mark.parametrize("command", [c for c in COMMANDS if KINDS["pip"].match(c)])
def test_installed_extras_exist(command: str) -> None:
    (extras,) = re.findall(r'^pip install "\.\[([\w,-]+)\]"$', command)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    kinds = [[kind for kind, pattern in KINDS.items() if pattern.match(c)] for c in COMMANDS]
    assert [len(found) for found in kinds] == [1] * len(COMMANDS)


def table(heading: str) -> dict[str, str]:
    """Rows of the two-column table whose header's first cell is the heading."""
    rows = re.search(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n?)*)", README, re.M)
    assert rows is not None
    cells = (re.split(r"\s*\|\s*", row.strip("| ")) for row in rows.group(1).splitlines())
    return {name.strip("`"): meaning for name, meaning in cells}


def test_table_of_variables_is_complete() -> None:
    assert table("variable") == environment.VARIABLES


def test_table_of_errors_is_complete() -> None:
    documented = {
        name: (getattr(torch_ops, name).__doc__ or "").partition(" Attributes:")[0].strip()
        for name in torch_ops.errors.__all__
        if name != "TorchOpsError"
    }
    assert table("error") == documented
