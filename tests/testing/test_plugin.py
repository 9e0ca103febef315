"""The pytest plugin, in sessions of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from torch_ops.testing.conformance import refuse_unknown

PLUGIN = "torch_ops.testing.plugin"


def _pytest(
    folder: Path, *options: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the conformance tests from another folder, as a backend's author does."""
    registered = any(e.value == PLUGIN for e in entry_points(group="pytest11"))
    loading = [] if registered else ["-p", PLUGIN]
    command = [sys.executable, "-m", "pytest", *loading, "-p", "no:cacheprovider", "--pyargs"]
    return subprocess.run(
        [*command, "torch_ops.testing", *options],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


def test_the_plugin_is_registered() -> None:
    assert [e.value for e in entry_points(group="pytest11") if e.value == PLUGIN] == [PLUGIN]


def test_a_backend_is_proven_by_one_command(tmp_path: Path) -> None:
    done = _pytest(tmp_path, "--torch-ops-backend", "torch", "-k", "min_p_filter-torch", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_conformance[min_p_filter-torch] PASSED" in done.stdout
    assert "1 passed" in done.stdout


def test_options_have_help(tmp_path: Path) -> None:
    done = _pytest(tmp_path, "--help")
    for option in ("--torch-ops-backend", "--torch-ops-device", "--torch-ops-profile"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "name the backend to prove: --torch-ops-backend NAME"),
        pytest.param(
            ("--torch-ops-backend", "nope"),
            "--torch-ops-backend: received 'nope', accepted",
            marks=pytest.mark.exhaustive,
        ),
        (("--torch-ops-backend", "acme"), "'acme' serves no declared op"),
    ],
)
def test_nothing_to_prove_is_an_error(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    environment = _distribution(tmp_path, "", "no_such_op")
    done = _pytest(tmp_path, *options, environment=environment)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("profile", "device", "message"),
    [
        ("x", "cpu", "--torch-ops-profile: received 'x', accepted dev, torch_ops_ci, "),
        ("dev", "x", "--torch-ops-device: received 'x', accepted a device, as cpu or cuda:1"),
        ("dev", "cuda:99", "--torch-ops-device: received 'cuda:99', accepted a device of this"),
    ],
)
def test_options_are_checked(profile: str, device: str, message: str) -> None:
    with pytest.raises(pytest.UsageError, match=message):
        refuse_unknown(profile, device)


def _distribution(folder: Path, kernel: str, op: str = "silu_and_mul") -> dict[str, str]:
    """Lays out another distribution with a backend of one op; gives the environment to use it."""
    package, info = folder / "acme_kernels", folder / "acme_kernels-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("def available():\n    return None\n")
    (package / f"{op}.py").write_text(kernel)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch_ops.backends]\nacme = acme_kernels\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


KERNEL = """
import torch

def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.float().contiguous().chunk(2, -1)
    return (torch.nn.functional.silu(gate){rounding} * value).to(x.dtype)

def supports(x: torch.Tensor) -> str | None:
    return "float64 (supported: 16 and 32 bits)" if x.dtype == torch.float64 else None
"""


def test_a_foreign_backend_is_proven(tmp_path: Path) -> None:
    environment = _distribution(tmp_path, KERNEL.format(rounding=""))
    done = _pytest(tmp_path, "--torch-ops-backend", "acme", environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_a_foreign_backend_that_rounds_too_early_is_red(tmp_path: Path) -> None:
    environment = _distribution(tmp_path, KERNEL.format(rounding=".to(x.dtype)"))
    done = _pytest(tmp_path, "--torch-ops-backend", "acme", environment=environment)
    assert done.returncode == 1
    assert "silu_and_mul on acme (cpu, torch_ops_ci): FAILED" in done.stdout
    assert "[covering/bound] out: error is 1." in done.stdout
    assert "Captured log" not in done.stdout
    verdicts = dict(re.findall(r"^(\w+)  +(passed|failed|unsupported)", done.stdout, re.MULTILINE))
    assert verdicts == {
        "float32": "passed", "float16": "failed", "bfloat16": "failed", "float64": "unsupported",
    }  # fmt: skip
