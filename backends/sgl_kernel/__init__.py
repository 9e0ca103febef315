"""sgl-kernel's kernels: built ahead, for NVIDIA GPUs.

Limits and layouts are those of sglang-kernel 0.4.6. Its operators are called directly: its Python
functions hand the norms to FlashInfer where that is installed.
"""

from __future__ import annotations

from torch_ops.installed import lacking
from torch_ops.platform import Requirement

__all__ = ["available", "requires"]

requires = frozenset({Requirement.cuda(min_arch=(8, 0))})


def available() -> str | None:
    """Whether the package is there; that its library loads shows at the first run."""
    return lacking("sgl_kernel", "sglang-kernel", "0.4.6", "0.5")
