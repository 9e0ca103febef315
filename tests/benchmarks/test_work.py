"""Bytes and operations of calls, against numbers counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_ops.testing.proofs._attention import visible

HALF = torch.bfloat16
V = torch.empty(3, 2, 4)


def _attention(**flags: Any) -> dict[str, Any]:
    q, k, v = torch.empty(2, 4, 4, 8), torch.empty(2, 4, 2, 8), torch.empty(2, 4, 2, 16)
    rest = {"is_causal": False, "scale": None, "window_left": -1, "logits_soft_cap": 0.0}
    return {"q": q.to(HALF), "k": k.to(HALF), "v": v.to(HALF), **rest, **flags}


def _rows(*names: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: torch.empty(4, 8, dtype=HALF) for name in names}
    return found | {"weight": torch.empty(8, dtype=HALF), "eps": 1e-6}


def _rope() -> dict[str, Any]:
    return {
        "q": torch.empty(3, 2, 4, dtype=HALF),
        "k": torch.empty(3, 1, 4, dtype=HALF),
        "cos_sin_cache": torch.empty(100, 4),
        "positions": torch.zeros(3, dtype=torch.int64),
        "is_neox": True,
    }


# 64 bytes are 4 rows of 8 numbers of 2 bytes, 16 a weight; 72 are q and k of 3 tokens.
BYTES = {
    "rms_norm": (_rows("x"), 64 + 16 + 64),
    "fused_add_rms_norm": (_rows("x", "residual"), 4 * 64 + 16),
    "gemma_fused_add_rms_norm": (_rows("x", "residual"), 4 * 64 + 16),
    "fused_add_rms_norm_": (_rows("x", "residual"), 4 * 64 + 16),
    "silu_and_mul": ({"x": torch.empty(4, 8, dtype=HALF)}, 64 + 32),
    "apply_rope": (_rope(), 2 * 72 + 3 * 8 + 3 * 4 * 4),
    "apply_rope_": (_rope(), 2 * 72 + 3 * 8 + 3 * 4 * 4),
    "merge_state": (
        {"v_a": V, "s_a": V[..., 0], "v_b": V, "s_b": V[..., 0]},
        3 * 3 * 2 * 4 * 4 + 3 * 3 * 2 * 4,
    ),
    "append_paged_kv_": (
        {
            "k": V, "v": V[:, :1], "k_cache": torch.empty(9, 8, 2, 4),
            "v_cache": torch.empty(9, 8, 1, 4), "slot_mapping": torch.zeros(3, dtype=torch.int64),
        },
        2 * (3 * 2 * 4 + 3 * 1 * 4) * 4 + 3 * 8,
    ),
    "apply_rope_append_paged_kv_": (
        {
            "q": torch.empty(3, 4, 4), "k": V, "v": V[:, :1], "cos_sin_cache": torch.empty(100, 4),
            "positions": torch.zeros(3, dtype=torch.int32), "k_cache": torch.empty(9, 8, 2, 4),
            "v_cache": torch.empty(9, 8, 1, 4), "slot_mapping": torch.zeros(3, dtype=torch.int64),
            "is_neox": True,
        },
        2 * (3 * 4 * 4 + 3 * 2 * 4 + 3 * 1 * 4) * 4 + 3 * 8 + 3 * 4 + 3 * 4 * 4,
    ),
    "scaled_mm_int8": (
        {
            "a": torch.zeros(4, 8, dtype=torch.int8), "b": torch.zeros(8, 2, dtype=torch.int8),
            "scale_a": torch.ones(4, 1), "scale_b": torch.ones(1, 2), "out_dtype": HALF,
            "bias": None,
        },
        4 * 8 + 8 * 2 + 4 * 4 + 2 * 4 + 4 * 2 * 2,
    ),
    "attention": (_attention(), 512 + 256 + 512 + 1024),
    "attention_with_lse": (_attention(), 512 + 256 + 512 + 1024 + 2 * 4 * 4 * 4),
}  # fmt: skip


@pytest.mark.parametrize("op", BYTES)
def test_bytes_are_read_and_written_once(op: str) -> None:
    from benchmarks._work import work

    args, expected = BYTES[op]
    assert work(op, args).bytes == expected


def test_flops_of_attention_count_visible_pairs() -> None:
    """2 sequences, 4 heads, 8 + 16 numbers: 2 * 24 * 2 * 4 = 384 operations a pair."""
    from benchmarks._work import work

    assert work("attention", _attention()).flops == 384 * 16
    assert work("attention", _attention(is_causal=True)).flops == 384 * (4 + 3 + 2 + 1)
    assert work("attention", _attention(is_causal=True, window_left=1)).flops == 384 * (1 + 3 * 2)
    assert work("rms_norm", _rows("x")).flops is None


@pytest.mark.parametrize("window", [-1, 0, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (5, 5), (3, 8), (6, 2)])
def test_visible_pairs_are_those_of_the_mask(
    queries: int, keys: int, is_causal: bool, window: int
) -> None:
    from benchmarks._work import visible_pairs

    seen = int(visible(queries, keys, is_causal, window).sum())
    assert visible_pairs(queries, keys, is_causal, window) == seen
