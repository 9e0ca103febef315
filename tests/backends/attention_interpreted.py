"""Run Triton attention in Triton's interpreter; writes one JSON object: check -> what broke.

A program of its own, since TRITON_INTERPRET has to be set before Triton is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import workers

OP = "attention_with_lse"
BACKEND = "torch_ops.backends.triton"
DTYPES = ("float32", "float16")
LAYERS = ("contract", "bound", "layout", "rerun")
LAWS = (
    "scaled_values", "moved_scale", "negated_logits", "unseen_keys", "masked_weight",
    "constant_values", "sequences", "heads", "repeated_heads",
)  # fmt: skip
# batch, queries, keys, key heads, group, head_dim; then what differs from the defaults
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "tiles": ((1, 150, 150, 1, 1, 16), {"is_causal": True}),
    "full": ((1, 40, 131, 1, 2, 32), {}),
    "long query": ((2, 70, 9, 2, 1, 16), {"is_causal": True}),
    "window": ((1, 90, 300, 1, 1, 16), {"is_causal": True, "window_left": 40}),
    "window of one": ((1, 33, 33, 2, 1, 16), {"is_causal": True, "window_left": 0}),
    "window to both sides": ((1, 70, 90, 1, 2, 16), {"window_left": 5}),
    "window past all keys": ((1, 9, 20, 1, 1, 16), {"window_left": 20}),
    "window before all keys": ((1, 80, 5, 1, 1, 16), {"window_left": 3}),
    "packed heads": ((3, 4, 65, 2, 7, 64), {"is_causal": True}),
    "sixteen heads": ((1, 3, 40, 1, 16, 16), {"is_causal": True, "window_left": 11}),
    "one query": ((2, 1, 130, 2, 4, 80), {"is_causal": True}),
    "cap": ((1, 20, 50, 1, 2, 16), {"is_causal": True, "logits_soft_cap": 1.0}),
    "cap and window": ((1, 12, 80, 1, 4, 16), {"window_left": 7, "logits_soft_cap": 30.0}),
    "negative scale": ((1, 20, 30, 1, 1, 16), {"scale": -0.3}),
    "no scale": ((1, 20, 30, 1, 1, 16), {"is_causal": True, "scale": 0.0}),
    "one element": ((1, 3, 5, 1, 2, 1), {"is_causal": True}),
    "head_dim 72": ((1, 6, 20, 1, 1, 72), {"is_causal": True}),
    "head_dim 96": ((1, 6, 20, 1, 1, 96), {"is_causal": True}),
    "head_dim 192": ((1, 6, 20, 1, 1, 192), {"is_causal": True}),
    "head_dim 256": ((1, 6, 20, 1, 1, 256), {"is_causal": True}),
    "narrow values": ((1, 9, 40, 1, 2, 64, 24), {"is_causal": True}),
    "wide values": ((1, 9, 40, 1, 2, 8, 136), {"is_causal": True}),
}
LAYOUTS = ("row_stride", "transposed", "expand0", "misalign", "unbind", "int64_stride", "step2")
LAW_CASES = ("packed heads", "window", "long query", "cap")


def checks() -> list[str]:
    """Name everything that is checked."""
    parts = [*CASES, *(f"layout {name}" for name in LAYOUTS), "zero", "classes"]
    parts += [f"laws of {name}" for name in LAW_CASES]
    return [f"{dtype}: {part}" for dtype in DTYPES for part in parts]


def run(check: str) -> None:
    """Run one check; raises what it finds."""
    from torch_ops.declarations import catalogue
    from torch_ops.testing.examine import Examiner, Tally
    from torch_ops.testing.proof import proof_of
    from torch_ops.testing.registered import registered

    dtype, part = check.split(": ")
    proof, tally = proof_of(OP), Tally()
    lawful = part.startswith("laws of ")
    only = (*LAYERS, *LAWS) if lawful else LAYERS
    examine = Examiner(registered(OP, "triton"), proof, catalogue()[OP].contract, only=only)
    part = part.removeprefix("laws of ")
    found = list(getattr(proof, part)(dtype)) if part in ("zero", "classes") else None
    for spec in found or [_spec(dtype, part, small=lawful)]:
        examine(spec, tally, with_laws=lawful)
    if tally.refused or not tally.executed:
        raise AssertionError(f"executed {tally.executed}, refused {dict(tally.refused)}")


def _spec(dtype: str, part: str, *, small: bool) -> Any:
    from torch_ops.testing.spec import Operand, Spec

    layout = part.removeprefix("layout ") if part not in CASES else "contig"
    sizes, changes = CASES.get(part, ((1, 20, 40, 2, 2, 64), {"is_causal": True}))
    if small:
        sizes = (2, min(sizes[1], 20), min(sizes[2], 70), 2, *sizes[4:])
        changes = {**changes, "window_left": min(changes.get("window_left", -1), 6)}
    names = ("batch", "queries", "keys", "kv_heads", "group", "head_dim", "value_dim")
    params = {"is_causal": False, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
    operands = {name: Operand(dtype, layout) for name in "qkv"}
    return Spec.of(OP, dict(zip(names, sizes, strict=False)), operands, params | changes, seed=3)


def choose_as_on_a_gpu() -> None:
    """Take the tiles and the packing of a GPU; those of the interpreter save it time."""
    ours: Any = importlib.import_module(f"{BACKEND}._attention")
    config = ours.config
    ours.config = lambda _, *rest: config("sm_90", *rest)
    ours.INTERPRETED = False


if __name__ == "__main__":
    choose_as_on_a_gpu()
    workers.work(checks(), run)
