"""The numerics kit: proves that a kernel computes what its declaration says.

Boundary: importing this package imports no hypothesis and no proof, so that the pytest plugin
costs nothing; the names below load what they need when they are first read.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ops.testing.build import build
    from torch_ops.testing.proof import Proof, proof_of, proofs
    from torch_ops.testing.result import Result
    from torch_ops.testing.spec import Operand, Spec
    from torch_ops.testing.verify import replay, verify

__all__ = [
    "Operand",
    "Proof",
    "Result",
    "Spec",
    "build",
    "proof_of",
    "proofs",
    "replay",
    "verify",
]

_HOME = {
    "Operand": "spec",
    "Proof": "proof",
    "replay": "verify",
    "Result": "result",
    "Spec": "spec",
    "build": "build",
    "proof_of": "proof",
    "proofs": "proof",
    "verify": "verify",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
