"""Run the Triton row kernels in Triton's interpreter; writes one JSON object: check -> what broke.

A program of its own, since TRITON_INTERPRET has to be set before Triton is imported.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import workers

OPS = (
    "rms_norm", "gemma_rms_norm", "layer_norm", "fused_add_rms_norm", "fused_add_rms_norm_",
    "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "apply_rope", "apply_rope_", "merge_state",
)  # fmt: skip
NORMS = OPS[:5]
DTYPES = ("float32", "float16")
PARTS = ("layouts", "zero", "classes", "tiles")
LAYERS = ("contract", "bound", "layout", "rerun", "batch_invariance")
BACKEND = "torch_ops.backends.triton"
# Rows of 200 elements in pieces of 32, a piece for each program or one program for all.
LONG = {
    "split": {"_LONGEST": 64, "_PIECE": 32, "_FEW": 1 << 40},
    "looped": {"_LONGEST": 64, "_FEW": 0, "INTERPRETED_TILE": 32},
}


def checks() -> list[str]:
    """Name everything that is checked."""
    names = [f"{op} {dtype} {part}" for op in OPS for dtype in DTYPES for part in PARTS]
    names += [f"{op} {dtype} {way}" for op in NORMS[2:] for dtype in DTYPES for way in LONG]
    return names + [f"{op} float64 {part}" for op in OPS for part in ("zero", "classes")]


def run(check: str) -> None:
    """Run one check; raises what it finds."""
    from torch_ops.declarations import catalogue
    from torch_ops.testing.examine import Examiner, Tally
    from torch_ops.testing.proof import proof_of
    from torch_ops.testing.registered import registered

    op, dtype, part = check.split()
    proof, tally = proof_of(op), Tally()
    subject = registered(op, "triton")
    contract = subject.under(catalogue()[op].contract)
    examine = Examiner(subject, proof, contract, only=LAYERS)
    with patched(op, part):
        for spec in specs(op, dtype, part):
            examine(spec, tally, with_laws=part == "layouts")
    if tally.refused or not tally.executed:
        raise AssertionError(f"executed {tally.executed}, refused {dict(tally.refused)}")
    if part == "layouts" and contract.batch_invariant and not tally.laws["batch_invariance"]:
        raise AssertionError("batch invariance was never checked")


def specs(op: str, dtype: str, part: str) -> list[Any]:
    """Give the examples of a check: of the covering array, the first of each layout."""
    from torch_ops.testing.draw import FLOATS
    from torch_ops.testing.proof import proof_of
    from torch_ops.testing.search import covering_rows

    proof = proof_of(op)
    if part in ("zero", "classes"):
        return list(getattr(proof, part)(dtype))
    first: dict[str, Any] = {}
    for spec in covering_rows(op, FLOATS):
        look = spec.operands[0][1]
        if look.dtype == dtype:
            first.setdefault(look.layout, spec)
    if part == "layouts":
        return list(first.values())
    if part == "tiles":
        return sorted(first.values(), key=lambda s: math.prod(n for _, n in s.dims))[1:6]
    dims = {"tokens": 3, "hidden": 200}
    nested = {"batch": 2, "tokens": 2, "hidden": 200}
    return [
        spec.replace(dims=tuple((nested if layout == "qkv_split" else dims).items()))
        for layout, spec in first.items()
        if layout in ("contig", "qkv_split", "transposed")
    ]


@contextmanager
def patched(op: str, part: str) -> Iterator[None]:
    """Use the tiles that a GPU gets, or treat rows of 200 elements as long ones."""
    family = "_norms" if op in NORMS else "_gates" if op.endswith("and_mul") else "_rotary"
    family = "_merges" if op == "merge_state" else family
    module = importlib.import_module(f"{BACKEND}.{family}")
    changes: dict[str, Any] = {"INTERPRETED": False} if part == "tiles" else LONG.get(part, {})
    if part == "tiles" and op in NORMS:
        changes["_CROWD"] = 2
    old = {name: getattr(module, name) for name in changes}
    kept = (module._ways if op in NORMS else module._plans, module._launches)
    for table in kept:
        table.clear()
    vars(module).update(changes)
    try:
        yield
    finally:
        vars(module).update(old)
        for table in kept:
            table.clear()


if __name__ == "__main__":
    workers.work(checks(), run)
