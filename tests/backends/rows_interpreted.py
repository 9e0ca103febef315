"""Run the Triton row kernels in Triton's interpreter; writes one JSON object: check -> what broke.

A program of its own, since TRITON_INTERPRET has to be set before Triton is imported.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from . import workers

OPS = (
    "rms_norm", "gemma_rms_norm", "layer_norm", "fused_add_rms_norm", "fused_add_rms_norm_",
    "gemma_fused_add_rms_norm",
    "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "apply_rope", "apply_rope_", "merge_state",
    "quantize_int8_per_token",
)  # fmt: skip
NORMS = OPS[:6]
NORM_GRADIENTS = ("rms_norm_backward", "layer_norm_backward")
GRADIENTS = (
    "silu_and_mul_backward", "gelu_and_mul_backward", "gelu_tanh_and_mul_backward",
    *NORM_GRADIENTS,
)  # fmt: skip
DTYPES = ("float32", "float16")
PARTS = ("layouts", "zero", "classes", "tiles")
LAYERS = ("contract", "bound", "layout", "rerun", "batch_invariance")
BACKEND = "torch_ops.backends.triton"
# Rows of 200 elements in pieces of 32, a piece for each program or one program for all; rows of 96
# in three pieces that are held.
LONG = {
    "split": {"_LONGEST": 64, "_PIECE": 32, "FEW": 1 << 40},
    "looped": {"_LONGEST": 64, "FEW": 0, "INTERPRETED_TILE": 32},
    "held": {"_LONGEST": 64, "FEW": 0, "INTERPRETED_TILE": 32},
}
# Gradients of two rows and more by each of two programs; of rows of 200 in pieces of 32.
SHARED: dict[str, dict[str, Any]] = {
    "shared": {"INTERPRETED_TILE": 64, "_FOLDED": (1, 8), "multiprocessors": lambda _: 1},
    "pieces": {"INTERPRETED_TILE": 64, "_LONGEST": 64, "_PIECE": 32},
}


def checks(*, every: bool = False) -> list[str]:
    """Name what is checked: every part in one of the dtypes, or in all."""
    names = [
        f"{op} {dtype} {part}"
        for i, op in enumerate(OPS)
        for j, part in enumerate(PARTS)
        for k, dtype in enumerate(DTYPES)
        if every or (i + j) % len(DTYPES) == k
    ]
    names += [
        f"{op} {dtype} {way}"
        for i, op in enumerate(NORMS[2:])
        for j, way in enumerate(LONG)
        for k, dtype in enumerate(DTYPES)
        if every or (i + j) % len(DTYPES) == k
    ]
    names += [f"quantize_int8_per_token float16 {way}" for way in ("looped", "held")]
    for op in GRADIENTS:
        names += [f"{op} float16 layouts", f"{op} float32 zero", f"{op} float64 classes"]
    names.remove("layer_norm_backward float16 layouts")  # read as those of the other one
    names += [f"{op} float16 {way}" for op in NORM_GRADIENTS for way in SHARED]
    names.append("fused_add_rms_norm_ float16 strided")
    kinds = DTYPES if every else ("float16",)  # which is rounded in between
    names += [f"{what} {dtype} composed" for what in ("norms", "gates") for dtype in kinds]
    return names + [f"{op} float64 {part}" for op in OPS[:-1] for part in ("zero", "classes")]


def run(check: str) -> None:
    """Run one check; raises what it finds."""
    from torch_ops.declarations import catalogue
    from torch_ops.testing.examine import Examiner, Tally
    from torch_ops.testing.proof import proof_of
    from torch_ops.testing.registered import registered

    op, dtype, part = check.split()
    if part == "composed":
        _composed(op, dtype)
        return
    if part == "strided":
        for way, columns in (("tiles", 96), ("looped", 200), ("held", 96)):
            with patched(op, way):
                _strided(columns)
        return
    proof, tally = proof_of(op), Tally()
    subject = registered(op, "triton")
    contract = subject.under(catalogue()[op].contract)
    examine = Examiner(subject, proof, contract, only=LAYERS)
    with nullcontext() if op in GRADIENTS[:3] else patched(op, part):
        for spec in specs(op, dtype, part):
            examine(spec, tally, with_laws=part == "layouts")
    if tally.refused or not tally.executed:
        raise AssertionError(f"executed {tally.executed}, refused {dict(tally.refused)}")
    if part == "layouts" and contract.batch_invariant and not tally.laws["batch_invariance"]:
        raise AssertionError("batch invariance was never checked")


def _composed(what: str, dtype: str) -> None:
    """Rows quantized at once, to int8, are bit for bit what two kernels make of them."""
    import torch

    both = norms_at_once if what == "norms" else gates_at_once
    kind, given = getattr(torch, dtype), torch.rand(2)[1:] + 0.01
    by_row = ((5, 96), (2, 3, 200), (1, 1), (3, 0), (0, 8), (2, 20480), (9, 16500), (9, 16384))
    calls: list[Any] = [(shape, (0, None)) for shape in by_row]
    if dtype == "float16":  # which is rounded in between
        calls += [((5, 96), (32, None)), ((2, 40), (8, None)), ((3, 0), (16, None))]
        calls += [((5, 96), (0, given)), ((0, 8), (0, given))]
        if what == "gates":  # in two pieces
            calls += [((2, 8224), (32, None)), ((2, 8224), (0, given))]
    for shape, scales in calls:
        _compose(both, shape, kind, scales)
    if dtype == "float16" and what == "norms":
        with patched("rms_norm", "looped"):
            for columns in (96, 80, 320):  # held, with a rest, and in too many pieces for that
                for scales in ((0, None), (0, given), (16, None)):
                    _compose(both, (2, columns), kind, scales)


def _strided(columns: int) -> None:
    """Rows apart are written where they are, and nothing between them."""
    import torch

    norms = importlib.import_module(f"{BACKEND}._norms")
    wide = [torch.randn(3, count * columns).half() for count in (2, 3)]
    (x, r), w = [rows[:, :columns] for rows in wide], torch.randn(columns)
    kept = [rows[:, columns:].clone() for rows in wide]
    wanted = norms.add_normalize(x.contiguous(), r.contiguous(), w, 1e-6)
    norms.add_normalize_in_place(x, r, w, 1e-6)
    found = (x, r, *[rows[:, columns:] for rows in wide])
    if not all(map(torch.equal, found, (*wanted, *kept))):
        raise AssertionError(f"{columns} columns: {found} instead of {wanted}")


def _compose(both: Any, shape: tuple[int, ...], kind: Any, scales: Any) -> None:
    import torch

    for step in (1, 2, 1):  # the last launch is one that is known
        found, wanted = both(shape, step, kind, scales)
        if not all(map(torch.equal, found, wanted)):
            raise AssertionError(f"{shape}, every {step}, {scales}: {found} instead of {wanted}")


def norms_at_once(
    shape: tuple[int, ...], step: int, kind: Any, scales: Any = (0, None)
) -> tuple[list[Any], list[Any]]:
    import torch

    fused = importlib.import_module(f"{BACKEND}._norm_quantization")
    norms = importlib.import_module(f"{BACKEND}._norms")
    quantize = importlib.import_module(f"{BACKEND}._quantization").quantize
    scales = importlib.import_module(f"{BACKEND}._quantization").Scales(*scales)
    x, r = (torch.randn(*shape[:-1], step * shape[-1]).to(kind)[..., ::step] for _ in "xr")
    w = torch.randn(shape[-1])
    y, total = norms.add_normalize(x, r, w, 1e-6)
    plain = norms.normalize(x, w, None, 1e-6, norms.RMS)
    return [
        *fused.normalize_quantize(x, w, 1e-6, torch.int8, scales),
        *fused.add_normalize_quantize(x, r, w, 1e-6, torch.int8, scales),
    ], [*quantize(plain, torch.int8, scales), *quantize(y, torch.int8, scales), total]


def gates_at_once(
    shape: tuple[int, ...], step: int, kind: Any, scales: Any = (0, None)
) -> tuple[list[Any], list[Any]]:
    import torch

    fused = importlib.import_module(f"{BACKEND}._gate_quantization")
    gates = importlib.import_module(f"{BACKEND}._gates")
    quantize = importlib.import_module(f"{BACKEND}._quantization").quantize
    scales = importlib.import_module(f"{BACKEND}._quantization").Scales(*scales)
    x = torch.randn(*shape[:-1], 2 * step * shape[-1]).to(kind)[..., ::step]
    found = fused.gated_quantize(x, gates.SILU, torch.int8, scales)
    return [*found], [*quantize(gates.gated(x, gates.SILU), torch.int8, scales)]


def specs(op: str, dtype: str, part: str) -> list[Any]:
    """Give the examples of a check: of the covering array, the first of each layout."""
    from torch_ops.testing.proof import proof_of
    from torch_ops.testing.search import covering_rows

    proof = proof_of(op)
    if part in ("zero", "classes"):
        return list(getattr(proof, part)(dtype))
    first: dict[str, Any] = {}
    for spec in covering_rows(op):
        look = spec.operands[0][1]
        if look.dtype == dtype:
            first.setdefault(look.layout, spec)
    if part == "layouts":
        return list(first.values())
    if part == "tiles":
        return sorted(first.values(), key=lambda s: math.prod(n for _, n in s.dims))[1:6]
    hidden = 96 if part == "held" else 200
    dims = {"tokens": 3, "hidden": hidden}
    nested = {"batch": 2, "tokens": 2, "hidden": hidden}
    return [
        spec.replace(dims=tuple((nested if layout == "qkv_split" else dims).items()))
        for layout, spec in first.items()
        if layout in ("contig", "qkv_split", "transposed")
    ]


@contextmanager
def patched(op: str, part: str) -> Iterator[None]:
    """Use the tiles that a GPU gets, or treat rows of 200 elements as long ones."""
    family = "_norms" if op in NORMS else "_gates" if op.endswith("and_mul") else "_rotary"
    family = {"merge_state": "_merges", OPS[-1]: "_quantization"}.get(op, family)
    family = "_norm_gradients" if op in NORM_GRADIENTS else family
    module = importlib.import_module(f"{BACKEND}.{family}")
    changes: dict[str, Any] = {"INTERPRETED": False} if part == "tiles" else LONG.get(part, {})
    changes = changes | SHARED.get(part, {})
    if part == "tiles" and op in NORMS:
        changes["_CROWD"] = 2
    if op == OPS[-1]:
        changes.pop("FEW", None)
    old = {name: getattr(module, name) for name in changes}
    kept: tuple[Any, ...] = ()
    if op not in NORM_GRADIENTS:  # what these keep they find by what changes, too
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
    workers.work(checks(every="--every" in sys.argv), run)
