"""The numerics kit: proves that a kernel computes what its declaration says.

Start at `torch_ops.testing.verify.verify`. Boundary: importing this package imports no hypothesis
and no proof, so that the pytest plugin costs nothing; the names below load when first read.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ops.testing.arguments import build
    from torch_ops.testing.proof import Proof, proof_of, proofs
    from torch_ops.testing.reproduction import replay
    from torch_ops.testing.result import Result
    from torch_ops.testing.spec import Operand, Spec

__all__ = ["Operand", "Proof", "Result", "Spec", "build", "proof_of", "proofs", "replay"]

_HOME = {
    "Operand": "spec",
    "Proof": "proof",
    "Result": "result",
    "Spec": "spec",
    "build": "arguments",
    "proof_of": "proof",
    "proofs": "proof",
    "replay": "reproduction",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
