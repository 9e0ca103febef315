"""What is shipped: the package list, the wheel in a clean environment, the cost of the import."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

HEAVY = (
    "triton",
    "flashinfer",
    "sgl_kernel",
    "aiter",
    "diffusers",
    "transformers",
    "rich",
    "typer",
    "hypothesis",
    "pytest",
    "torch._dynamo",
    "torch._inductor",
)
CORE = (
    "test_explain",
    "test_installed",
    "test_plugins",
    "test_registry",
    "test_schema",
    "test_selector",
)
TORCH_IMPORT_S = 1.0  # of a machine that the budget is for: a slower one has more time
IMPORT_BUDGET_S = 0.05 + 0.003 * len([*(ROOT / "torch_ops" / "declarations").glob("[!_]*.py")])


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command and return its stdout; a failure shows both streams."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def source_packages() -> set[str]:
    """Every importable folder of the tree under the name that it is installed as."""
    found = set()
    for top in ("torch_ops", "backends"):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = list(init.parent.relative_to(ROOT).parts)
            found.add(".".join(["torch_ops", *parts] if top == "backends" else parts))
    return found


def test_packages_equal_tree() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == source_packages()


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {
        module.parent for top in ("torch_ops", "backends") for module in (ROOT / top).rglob("*.py")
    }
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").is_file()] == []


def test_builtin_backends_are_entry_points() -> None:
    """A built-in backend comes through the same door as a foreign one."""
    entries = PROJECT["project"]["entry-points"]["torch_ops.backends"]
    folders = {init.parent.name for init in (ROOT / "backends").glob("*/__init__.py")}
    assert entries == {name: f"torch_ops.backends.{name}" for name in folders}


@pytest.mark.parametrize("path", sorted((ROOT / "constraints").glob("*.txt")), ids=lambda p: p.stem)
def test_constraints_pin_the_torch_of_their_name(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert [re.split("[=<>]", line)[0] for line in lines] == ["torch", "triton"]
    assert lines[0].startswith(f"torch=={path.stem.removeprefix('torch-')}.")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing is left in the tree."""
    source = tmp_path_factory.mktemp("source")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("torch_ops", "backends"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", out, cwd=source)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {"torch_ops/py.typed"}
    expected |= {str(path.relative_to(ROOT)) for path in ROOT.glob("torch_ops/tables/*.json")}
    for top, prefix in (("torch_ops", ""), ("backends", "torch_ops/")):
        expected |= {prefix + str(path.relative_to(ROOT)) for path in (ROOT / top).rglob("*.py")}
    assert names == expected


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; torch and the test tools come from this one.

    The path file only extends ``sys.path``: path hooks of this environment, such as that of an
    editable install, aren't carried over.
    """
    home = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    site = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home
        ).strip()
    )
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=home)
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_is_what_is_imported(clean_python: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util, json, torch_ops, torch_ops.backends;"
        "print(json.dumps([torch_ops.__file__, torch_ops.backends.__file__,"
        "importlib.util.find_spec('backends') is None,"
        "sorted({s.backend.value for op in torch_ops.registry.ops()"
        " for s in torch_ops.registry.get(op)})]))"
    )
    core, backends, hidden, names = json.loads(run(clean_python, "-c", code, cwd=tmp_path))
    home = clean_python.parents[1]
    assert Path(core).is_relative_to(home)
    assert Path(backends).is_relative_to(home)
    assert hidden, "the top-level folder is importable as 'backends'"
    assert names == sorted(PROJECT["project"]["entry-points"]["torch_ops.backends"])


def test_import_is_cheap(clean_python: Path, tmp_path: Path) -> None:
    """Processor time, minimum over processes: other work on the machine only ever adds to it.

    Two are timed, and up to five where those took too long.
    """
    code = (
        "import time; clock = time.process_time; began = clock(); import torch; torchs = clock();"
        "import torch_ops; print(clock() - torchs, torchs - began)"
    )
    timed: list[tuple[float, ...]] = []
    for _ in range(5):
        timed.append(tuple(map(float, run(clean_python, "-c", code, cwd=tmp_path).split())))
        own, torchs = map(min, zip(*timed, strict=True))
        budget = IMPORT_BUDGET_S * max(torchs / TORCH_IMPORT_S, 1.0)
        if len(timed) > 1 and own <= budget:
            break
    assert own <= budget, f"import torch_ops took {own:.3f} s of its own, torch {torchs:.3f}"


def test_import_loads_nothing_heavy(clean_python: Path, tmp_path: Path) -> None:
    code = "import sys, json, torch_ops; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run(clean_python, "-c", code, cwd=tmp_path)))
    assert "torch_ops" in loaded
    assert [name for name in HEAVY if name in loaded] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_core_passes_on_the_wheel(clean_python: Path, tmp_path: Path) -> None:
    """From a folder without the sources, so that only what is shipped can be found."""
    (tmp_path / "pyproject.toml").write_text(pytest_configuration())
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("core", "plugins"):
        shutil.copytree(ROOT / "tests" / name, tmp_path / "tests" / name, ignore=skip)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    # What is compiled or checked op by op is no matter of packaging: the suite itself does that.
    picked = (
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *(f"tests/core/{n}.py" for n in CORE),
    )
    shown = run(clean_python, "-c", code, *picked, cwd=tmp_path)
    assert re.search(r"^\d+ passed", shown.splitlines()[-1]), shown


def pytest_configuration() -> str:
    """The table ``[tool.pytest.ini_options]`` of the project, alone."""
    text = (ROOT / "pyproject.toml").read_text()
    (table,) = re.findall(r"^\[tool\.pytest\.ini_options\]\n(?:(?!\[).*\n)*", text, re.M)
    return str(table)
