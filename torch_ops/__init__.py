"""torch_ops: which kernel runs, and how to change it without breaking a compiled graph.

Every logical op is declared once as a PyTorch operator, ``torch.ops.torch_ops.<op>``; the kernel
behind it is chosen by platform, call, scope, process, environment or per layer.
Importing this package imports torch and nothing heavier.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from torch_ops import declarations as _declarations
from torch_ops import errors, ops
from torch_ops.backend import Backend
from torch_ops.errors import *  # noqa: F403  (re-exported: torch_ops.errors lists them)
from torch_ops.errors import __all__ as _errors
from torch_ops.explanation import Explanation, explain
from torch_ops.inlining import set_inline
from torch_ops.maintenance import refresh, warmup
from torch_ops.platform import Platform, Requirement
from torch_ops.policy import debug, set_backend, use_backend
from torch_ops.registry import KernelRegistry, register_kernel, registry
from torch_ops.selector import Candidate, get_kernel, select_kernel
from torch_ops.spec import KernelSpec
from torch_ops.tracing import Trace, trace
from torch_ops.tuning import clear_tuning_table, load_tuning_table

_declarations.catalogue()


def __getattr__(name: str) -> Any:
    """Give a subpackage or the version when it is first named, so that importing stays cheap."""
    if name == "__version__":
        return importlib.metadata.version("torch-ops")
    if name in ("attention", "integrations", "testing"):
        return importlib.import_module(f"torch_ops.{name}")
    raise AttributeError(f"module 'torch_ops' has no attribute {name!r}")


__all__ = [  # noqa: PLE0604  (the errors' names come from their module)
    "Backend",
    "Candidate",
    "Explanation",
    "KernelRegistry",
    "KernelSpec",
    "Platform",
    "Requirement",
    "Trace",
    "clear_tuning_table",
    "debug",
    "errors",
    "explain",
    "get_kernel",
    "load_tuning_table",
    "ops",
    "refresh",
    "register_kernel",
    "registry",
    "select_kernel",
    "set_backend",
    "set_inline",
    "trace",
    "use_backend",
    "warmup",
    *_errors,
]
