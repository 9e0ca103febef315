"""Run Triton's ragged and paged attention in its interpreter; one JSON object: check -> what broke.

A program of its own, since TRITON_INTERPRET has to be set before Triton is imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from . import latents, workers

BACKEND = "torch_ops.backends.triton"
OPS = ("paged_decode", "paged_prefill", "varlen_attention_with_lse")
DTYPES = ("float32", "float16")
LAYERS = ("contract", "bound", "layout", "rerun")
LAWS = (
    "scaled_values", "negated_logits", "unseen_keys", "masked_weight", "constant_values", "unread",
    "sequences", "heads", "repeated_heads", "moved_pages", "one_page", "later_queries",
    "larger_bounds", "split_keys", "negated", "scaled_latents", "moved_scale", "one_key",
    "constant_latents",
)  # fmt: skip
LAYOUTS = ("row_stride", "unbind", "heads_first", "transposed", "misalign")
# What differs from the defaults.
CASES: dict[str, dict[str, Any]] = {
    "full": {"is_causal": False},
    "causal": {},
    "window": {"window_left": 19},
    "window of everything": {"window_left": 2**40},
    "window of one": {"window_left": 0, "logits_soft_cap": 5.0},
    "negative scale": {"scale": -0.3, "logits_soft_cap": 30.0, "is_causal": False},
}
# Beside those of the proofs: sequences of many pieces, more sequences than are looked through at
# once, pages of a part of a tile, of many tiles and of one key.
SIZES: dict[str, dict[str, Any]] = {
    "pieces": {"page_size": 16, "kv_heads": 1, "group": 4, "head_dim": 16},
    "pages of one": {"page_size": 1, "kv_heads": 1, "group": 2, "head_dim": 16},
    "large pages": {"page_size": 128, "kv_heads": 1, "group": 1, "head_dim": 32},
    "sixteen heads": {"page_size": 8, "kv_heads": 1, "group": 16, "head_dim": 8},
    "many heads": {"page_size": 32, "kv_heads": 1, "group": 71, "head_dim": 8},
    "wide values": {"page_size": 4, "kv_heads": 2, "group": 1, "head_dim": 16, "value_dim": 40},
}
_LENGTHS = ([1, 0, 9, 3], [300, 40, 0, 17])
MANY = "more sequences than one look takes"
REPEATED = "one element for all of a head: "


def checks(*, every: bool = False) -> list[str]:
    """Name what is checked: every part of one of the ops in a dtype, or of all in both."""
    parts = [*CASES, *SIZES, *(f"layout {name}" for name in LAYOUTS)]
    parts += [
        "zero",
        "classes",
        "laws",
        "laws of windows",
        MANY,
        *(f"{REPEATED}{n}" for n in "qkv"),
    ]
    return [
        f"{op} {dtype}: {part}"
        for i, op in enumerate(OPS)
        for j, part in enumerate(parts)
        for k, dtype in enumerate(DTYPES)
        if every or ((i + j) % len(DTYPES) == k and (i + j) % len(OPS) == 1)
    ] + [*latents.INTERPRETED]


def run(check: str) -> None:
    """Run one check; raises what it finds."""
    from torch_ops.declarations import catalogue
    from torch_ops.testing.examine import Examiner, Tally
    from torch_ops.testing.proof import proof_of
    from torch_ops.testing.registered import registered

    (op, dtype), part = check.split(": ", maxsplit=1)[0].split(), check.split(": ", maxsplit=1)[1]
    if part.startswith(REPEATED):
        _repeated(op, dtype, "qkv".index(part.removeprefix(REPEATED)))
        return
    proof, tally = proof_of(op), Tally()
    lawful = part.startswith("laws")
    only = (*LAYERS, *LAWS) if lawful else LAYERS
    examine = Examiner(registered(op, "triton"), proof, catalogue()[op].contract, only=only)
    of_proof = list(getattr(proof, part)(dtype)) if part in ("zero", "classes") else None
    specs = latents.specs(dtype, part) if op == latents.OP else _specs(op, dtype, part)
    for spec in of_proof or specs:
        examine(spec, tally, with_laws=lawful)
    if tally.refused or not tally.executed:
        raise AssertionError(f"executed {tally.executed}, refused {dict(tally.refused)}")


def _repeated(op: str, dtype: str, place: int) -> None:
    """Give queries, keys or values with a stride of 0 in the last axis."""
    from tests.cases.kernels import judge
    from torch_ops.testing import build
    from torch_ops.testing.registered import registered

    (spec,) = _specs(op, dtype, "contig")
    args = list(build(spec).values())
    args[place] = args[place][..., :1].expand(args[place].shape)
    found = registered(op, "triton").call(*args)
    judge(op, tuple(args), found if isinstance(found, tuple) else (found,))


def _specs(op: str, dtype: str, part: str) -> list[Any]:
    from torch_ops.testing.proofs._paged import DECODE, PREFILL
    from torch_ops.testing.proofs._ragged import PACKED, sized, spec_of
    from torch_ops.testing.spec import Operand

    form = {"paged_decode": DECODE, "paged_prefill": PREFILL}.get(op, PACKED)
    queries, keys = _LENGTHS
    if part in SIZES:
        chosen = [sized(queries, keys, pad=2, spare=1, **SIZES[part])]
    elif part == MANY:
        heads: dict[str, Any] = {
            "kv_heads": 1,
            "group": 1,
            "head_dim": 4,
            "page_size": 4,
            "pad": 0,
            "spare": 1,
        }
        lengths = ([1, 0, 2] * 9, [3, 2, 0] * 9)
        chosen = [sized(*lengths, **heads)]
    elif part in CASES:  # two or three of the sizes each
        names = [name for name in form.dims if name not in ("far", "ragged")]
        number = list(CASES).index(part)
        chosen = [form.dims[name] for name in ("ragged", *names[number % 3 :: 3])]
    else:
        chosen = [form.dims["ragged"]]
    params: dict[str, Any] = {"is_causal": True, **CASES.get(part, {})}
    if part == "laws of windows":
        params |= {"window_left": 6}
    elif part == "laws":
        params |= {"is_causal": False}
    layout = part.removeprefix("layout ") if part.startswith("layout") else "contig"
    looks = {"q": Operand(dtype)}
    if layout in form.key_layouts:
        looks |= {name: Operand(dtype, layout) for name in (form.keys, form.values)}
    if op == "paged_decode":
        chosen = [{n: d for n, d in dims.items() if not n.startswith("qo")} for dims in chosen]
    return [spec_of(op, form, dims, looks, params, seed=3) for dims in chosen]


def choose_as_on_a_gpu() -> None:
    """Take the tiles of a GPU, where pieces of sequences are as small as they can be."""
    decode: Any = importlib.import_module(f"{BACKEND}._paged_decode")
    ragged: Any = importlib.import_module(f"{BACKEND}._ragged")
    config = ragged.config
    decode.config = lambda *_: decode.Config(16, 4, 3, 4, 1)
    ragged.config = lambda _, *rest: config("sm_90", *rest)
    mla: Any = importlib.import_module(f"{BACKEND}._mla_decode")
    mla.config = lambda *_: mla.Config(16, 16, 4, 2, 4, 1)
    decode.SEQUENCES = mla.SEQUENCES = ragged._SEQUENCES = 8


if __name__ == "__main__":
    choose_as_on_a_gpu()
    workers.work(checks(every="--every" in sys.argv), run)
