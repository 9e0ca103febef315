"""FlashInfer's kernels: compiled by nvcc at their first use, for fp16 and bf16 on NVIDIA GPUs.

Limits and layouts are those of the sources of 0.6.13. Its compiled functions are called directly,
so that a later series, whose functions may differ, is refused.
"""

from __future__ import annotations

from torch_ops.installed import lacking
from torch_ops.platform import Requirement

__all__ = ["attention_backends", "available", "requires"]

attention_backends = ("flashinfer_fa3", "flashinfer_fa2")
requires = frozenset({Requirement.cuda(min_arch=(8, 0))})


def available() -> str | None:
    """Whether the package is there; that its kernels compile shows at their first run."""
    return lacking("flashinfer", "flashinfer-python", "0.6.13", "0.7")
