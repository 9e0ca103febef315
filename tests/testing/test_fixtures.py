"""Oracles and references against values that PyTorch had no part in."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops.declarations import catalogue
from torch_ops.testing import proof_of
from torch_ops.testing.compare import check_output
from torch_ops.testing.proof import Output, proof_names
from torch_ops.testing.search import dtypes_of

from .fixtures import generate

CASES: list[dict[str, Any]] = json.loads(generate.FILE.read_text())
IDS = [f"{i}-{case['op']}" for i, case in enumerate(CASES)]
FLOAT32 = ("cos_sin_cache", "lse", "grad_lse", "s_a", "s_b", "p", "min_p")
INT32 = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
INT64 = ("positions", "slot_mapping", "seed", "offset")


def _arguments(case: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    def one(name: str, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kinds = ((FLOAT32, torch.float32), (INT32, torch.int32), (INT64, torch.int64))
        kind = next((kind for names, kind in kinds if name in names), dtype)
        if name == "k" and "probs" in case["args"]:  # a number, not keys
            kind = torch.int32
        return torch.tensor(value, dtype=kind)

    return {name: one(name, value) for name, value in case["args"].items()}


def _expected(case: dict[str, Any], bounds: tuple[Output, ...]) -> list[Output]:
    """The fixture's values with the bounds of the oracle; outputs without a bound stay exact."""
    found = []
    for text, bound in zip(case["outputs"], bounds, strict=True):
        value = torch.tensor(_floats(text), dtype=torch.float64).view(bound.value.shape)
        found.append(Output(bound.name, value, bound.bound, bound.dtype))
    return found


def _floats(text: Any) -> Any:
    return [_floats(t) for t in text] if isinstance(text, list) else float(text)


def test_the_file_is_what_the_program_computes() -> None:
    computed = json.loads(json.dumps(generate.compute()))
    assert computed == CASES


# Codes, ids and compositions, whose values stand in tests/cases (rows Q and E), and products, which
# a law compares with exact sums of whole numbers.
ELSEWHERE = {
    "fused_add_rms_norm_quant_fp8", "fused_add_rms_norm_quant_fp8_per_group",
    "fused_add_rms_norm_quant_fp8_per_tensor", "fused_experts", "moe_align_block_size",
    "quantize_fp8_per_group", "quantize_fp8_per_tensor", "quantize_fp8_per_token",
    "quantize_int8_per_token", "rms_norm_quant_fp8", "rms_norm_quant_fp8_per_group",
    "rms_norm_quant_fp8_per_tensor", "scaled_mm_fp8", "scaled_mm_int8", "silu_and_mul_quant_fp8",
    "silu_and_mul_quant_fp8_per_group", "silu_and_mul_quant_fp8_per_tensor", "topk_softmax",
}  # fmt: skip


def test_every_op_has_fixtures_and_there_are_many() -> None:
    assert {case["op"] for case in CASES} == set(proof_names()) - ELSEWHERE
    values = sum(torch.tensor(_floats(o)).numel() for case in CASES for o in case["outputs"])
    assert values >= 100


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_oracle_gives_the_fixture(case: dict[str, Any]) -> None:
    contract = catalogue()[case["op"]].contract
    oracle = proof_of(case["op"]).oracle(_arguments(case, torch.float64), contract)
    for want, got in zip(_expected(case, oracle), oracle, strict=True):
        check_output(got.value, Output(want.name, want.value, want.bound, torch.float64))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{name}-{dtype}")
        for case, name in zip(CASES, IDS, strict=True)
        for dtype in dtypes_of(case["op"])
    ],
)
def test_the_reference_gives_the_fixture(case: dict[str, Any], dtype: str) -> None:
    op, args = case["op"], _arguments(case, getattr(torch, dtype))
    oracle = proof_of(op).oracle(args, catalogue()[op].contract)
    result = getattr(torch_ops.ops, op)(*args.values(), backend="torch")
    outputs = (result,) if isinstance(result, Tensor) else result
    if proof_of(op).mutates:
        outputs = tuple(args[name] for name in proof_of(op).mutates)
    for got, want in zip(outputs, _expected(case, oracle), strict=True):
        assert got.dtype == want.dtype
        check_output(got, want)
