"""Stand-ins for packages that backends wrap: they are found, and raise when they are imported."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PACKAGES = {
    "flashinfer": ("flashinfer", "flashinfer_python", "0.6.13"),
    "sgl_kernel": ("sgl_kernel", "sglang_kernel", "0.4.6"),
}
"""Module, distribution and a supported version, by backend for NVIDIA GPUs."""

EVERY = PACKAGES | {"aiter": ("aiter", "amd_aiter", "0.1.19")}
"""Those for AMD GPUs, too."""


def install(site: Path, backend: str, version: str | None = None) -> None:
    """Put a package that can't be imported into a folder, with its metadata."""
    module, distribution, supported = EVERY[backend]
    (site / module).mkdir(parents=True)
    (site / module / "__init__.py").write_text(f"raise AssertionError('{module} was imported')\n")
    info = site / f"{distribution}-{version or supported}.dist-info"
    info.mkdir()
    name = distribution.replace("_", "-")
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version or supported}\n"
    (info / "METADATA").write_text(text)


def python(script: str, *paths: Path, **env: str) -> str:
    """Run a script in a process of its own and give what it prints; it has to succeed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_OPS_")}
    path = os.pathsep.join([*map(str, paths), clean.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=clean | {"PYTHONPATH": path} | env,
        cwd=paths[0] if paths else None,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
