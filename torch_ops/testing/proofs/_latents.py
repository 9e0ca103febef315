"""Proof of attention to a paged cache of latents: Specs, and what it is in dense attention.

One key of all heads: a latent and a rotated part, side by side; the latent is the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn, SearchStrategy
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Shapes
from torch_ops.testing.proofs import _paged
from torch_ops.testing.proofs._attention import QK
from torch_ops.testing.proofs._ragged import Dims, Form, Run, sized, spec_of
from torch_ops.testing.proofs._ragged_specs import TABLE_LAYOUTS
from torch_ops.testing.spec import Operand, Spec

OP = "mla_decode"
LATENTS = (
    "normal", "small", "grid", "zeros", "sparse", "one_hot", "alternating", "ties", "sorted",
)  # fmt: skip
SCALES = (0.25, 1.0, -0.125)
DIMS: dict[str, Dims] = {
    "one": sized([], [1], heads=1, latent=8, rope=8, pad=0, page_size=1, spare=1),
    "decode": sized([], [33, 16, 1, 17], heads=16, latent=64, rope=16, pad=1, page_size=16,
                    spare=3),
    "ragged": sized([], [5, 4, 2, 0, 9], heads=4, latent=32, rope=8, pad=2, page_size=4, spare=5),
    "ends": sized([], [0, 17, 3], heads=6, latent=24, rope=3, pad=3, page_size=8, spare=4),
    "tile": sized([], [20, 9], heads=72, latent=16, rope=8, pad=0, page_size=13, spare=1),
    "wide": sized([], [9, 20], heads=3, latent=512, rope=64, pad=0, page_size=64, spare=1),
    "far": sized([], [5, 9], heads=2, latent=1, rope=1, pad=1, page_size=1, spare=66_000),
}  # fmt: skip
AXES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "dims": tuple(DIMS),
    "regime": ("normal", "grid", "zeros", "one_hot", "equal_rows", "alternating"),
    "latents": ("normal", "grid", "zeros", "sparse"),
    "scale": SCALES,
}
# Model, batch, keys of each sequence. Few tokens of few heads are proven, the rest is timed.
NAMED = (
    ("deepseek-v3", 128, 64, 4096), ("deepseek-v3", 128, 1, 4096), ("deepseek-v3", 128, 1, 33),
    ("deepseek-v3, 8 GPUs", 16, 64, 4096), ("deepseek-v3, 8 GPUs", 16, 2, 70),
)  # fmt: skip
DEEPSEEK_SCALE = 0.1352337788608801  # (1 + 0.1 ln 40)^2 (128 + 64)^-0.5, for 40 times the context


class Latents(Form):
    """A form whose keys are two caches, one of them that of values."""

    def one(self, args: Arguments, run: Run) -> Arguments:
        """One sequence as arguments of dense attention, a batch of one."""
        latents = args[self.values][run.keys]
        q = torch.cat([args[name][run.rows] for name in self.queries], -1)
        k = torch.cat([latents, args[self.keys][run.keys]], -1)
        dense = {"q": q, "k": k.unsqueeze(1), "v": latents.unsqueeze(1)}
        return {name: tensor.unsqueeze(0) for name, tensor in dense.items()} | {
            "is_causal": False, "scale": args["scale"], "window_left": -1, "logits_soft_cap": 0.0,
        }  # fmt: skip


def _shapes(spec: Spec) -> Shapes:
    d, count = spec.dim, sum(_paged.page_counts(spec))
    slots = (count + d.get("spare", 0), d["page_size"])
    return {
        "q_nope": (d["batch"], d["heads"], d["latent"]),
        "q_pe": (d["batch"], d["heads"], d["rope"]),
        "ckv_cache": (*slots, d["latent"]),
        "kpe_cache": (*slots, d["rope"]),
        "kv_indptr": (d["batch"] + 1,),
        "kv_indices": (count + d.get("pad", 0),),
        "kv_last_page_len": (d["batch"],),
    }


def _fill(spec: Spec, name: str, values: Tensor) -> Tensor:
    return values if name.startswith("q_") else _paged.fill(spec, name, values)


FORM = Latents(
    arguments=("q_nope", "q_pe", "ckv_cache", "kpe_cache", *_paged.TABLES, "scale"),
    keys="kpe_cache",
    values="ckv_cache",
    runs=_paged.decode_runs,
    shapes=_shapes,
    fill=_fill,
    dims=DIMS,
    tables=_paged.TABLES,
    key_layouts=("contig", "unbind", "row_stride", "qkv_split", "misalign", "transposed"),
    queries=("q_nope", "q_pe"),
)


def row(dtype: str, choice: Mapping[str, Any]) -> Spec:
    """Make the Spec of a row of the covering array."""
    dims = dict(DIMS[choice["dims"]])
    if choice["layout"] == "int64_stride":
        dims |= {"heads": 1}
    looks = {
        "q_nope": Operand(dtype, choice["layout"], choice["regime"]),
        "q_pe": Operand(dtype, pieces.pick(choice, "q_pe", FORM.key_layouts), "normal"),
        "ckv_cache": Operand(
            dtype, pieces.pick(choice, "ckv", FORM.key_layouts), choice["latents"]
        ),
        "kpe_cache": Operand(dtype, pieces.pick(choice, "kpe", FORM.key_layouts), "normal"),
    }
    for name in FORM.tables:
        looks[name] = Operand("int32", pieces.pick(choice, name, TABLE_LAYOUTS), "first", 1)
    spec = spec_of(OP, FORM, dims, looks, {"scale": choice["scale"]}, seed=1)
    return pieces.fitted(spec, _shapes(spec))


@st.composite
def _specs(draw: DrawFn, dtype: str, budget: int) -> Spec:
    heads, batch = draw(st.sampled_from((1, 2, 3, 8, 16, 17, 40, 128))), draw(st.integers(1, 5))
    limit = max(budget // (batch * heads), 9)
    latent = draw(st.sampled_from([n for n in (16, 64, 32, 128, 512, 24, 8, 1) if n <= limit]))
    rope = draw(st.sampled_from([n for n in (8, 16, 64, 3, 1) if n <= limit]))
    page = draw(st.sampled_from((16, 1, 8, 64, 3, 13, 4)))
    sizes = sorted({0, 1, 2, 3, page - 1, page, page + 1, 2 * page, 33, 64, 65, 130})
    most = max(budget // (batch * heads * (latent + rope)), 1)
    keys = [draw(st.sampled_from([n for n in sizes if n <= most])) for _ in range(batch)]
    dims = sized([], keys, heads=heads, latent=latent, rope=rope, page_size=page)
    dims |= {"pad": draw(st.integers(0, 3)), "spare": draw(st.integers(0, 4))}
    shape = _shapes(Spec.of(OP, dims, {}))
    looks = {name: draw(pieces.operand(dtype, shape[name], QK)) for name in FORM.queries}
    for name in ("ckv_cache", "kpe_cache"):
        layout = draw(st.sampled_from(FORM.key_layouts))
        looks[name] = Operand(dtype, layout, draw(st.sampled_from(LATENTS)))
    for name in FORM.tables:
        looks[name] = Operand("int32", draw(st.sampled_from(TABLE_LAYOUTS)), "first", 1)
    params = {"scale": draw(st.sampled_from((*SCALES, 0.0)))}
    return pieces.fitted(spec_of(OP, FORM, dims, looks, params, draw(pieces.seeds())), shape)


def strategy(dtype: str, budget: int) -> SearchStrategy[Spec]:
    """Specs of a dtype."""
    return _specs(dtype, budget)


def _plain(
    dtype: str, dims: Dims, looks: Mapping[str, Operand] = MappingProxyType({}), scale: float = 0.25
) -> Spec:
    return spec_of(OP, FORM, dims, {"q_nope": Operand(dtype), **looks}, {"scale": scale})


def zero(dtype: str) -> list[Spec]:
    """No sequences, no keys, no heads, parts of no elements."""
    base = DIMS["ragged"]
    keyless = base | {f"kv{i}": 0 for i in range(base["batch"])}
    changes = (
        base | {"batch": 0}, keyless, keyless | {"pad": 0, "spare": 0},
        *(base | {name: 0} for name in ("heads", "latent", "rope")),
    )  # fmt: skip
    return [_plain(dtype, dims) for dims in changes]


def classes(dtype: str) -> list[Spec]:
    """NaN in a query spreads over its row; in a latent or its rotated part over its sequence.

    Every slot of these is read, wherever a special value falls.
    """
    dims = sized([], [4, 2], heads=2, latent=8, rope=8, pad=0, page_size=2, spare=0)
    return [
        _plain(dtype, dims, {name: Operand(dtype, specials=((13, "nan"),))})
        for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    ]


def named(dtype: str) -> dict[str, Spec]:
    """Decode steps of models, as ``batch x keys`` of each sequence."""
    found = {}
    for model, heads, batch, keys in NAMED:
        dims = {
            "batch": batch, "qo": 1, "kv": keys, "heads": heads, "latent": 512, "rope": 64,
            "page_size": 64, "pad": 0, "spare": 0,
        }  # fmt: skip
        found[f"{model}, {batch}x{keys}"] = _plain(dtype, dims, scale=DEEPSEEK_SCALE)
    return found
