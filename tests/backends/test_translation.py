"""Both backends on models of their packages, judged by the kit: only the translation can err."""

from __future__ import annotations

from typing import Any

import pytest

from torch_ops.testing.draw import FLOATS

from . import examples

LATER = pytest.mark.exhaustive
HALVES = ("float16", "bfloat16")
ALL = ("float32", *HALVES)
TAKEN: dict[str, dict[str, tuple[str, ...]]] = {
    "flashinfer": dict.fromkeys(
        (
            "rms_norm", "gemma_rms_norm", "silu_and_mul", "gelu_and_mul", "apply_rope",
            "apply_rope_", "attention", "attention_with_lse", "varlen_attention",
            "varlen_attention_with_lse", "paged_prefill", "paged_decode", "mla_decode",
        ),
        HALVES,
    ) | {"layer_norm": ("bfloat16",)},
    "sgl_kernel": {
        "rms_norm": HALVES,
        "gemma_rms_norm": HALVES,
        "silu_and_mul": ALL,
        "gelu_and_mul": ALL,
        "fused_add_rms_norm": ("float32",),
        "fused_add_rms_norm_": ("float32",),
        "apply_rope": ("float32",),
        "apply_rope_": ("float32",),
        "scaled_mm_fp8": HALVES,
        "scaled_mm_int8": HALVES,
        "quantize_fp8_per_group": ("float16",),
    },
}  # fmt: skip
"""Dtypes that each backend takes calls of, by op."""
CELLS = [
    (b, op, dtype) for b, ops in TAKEN.items() for op, dtypes in ops.items() for dtype in dtypes
]
# On models, one dtype of each op: the next op has the next one.
SAMPLED = [
    pytest.param(b, op, dtype, marks=() if dtype == dtypes[i % len(dtypes)] else LATER)
    for b, ops in TAKEN.items()
    for i, (op, dtypes) in enumerate(ops.items())
    for dtype in dtypes
]
REFUSED: dict[str, dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "flashinfer": {
        "fused_add_rms_norm": (HALVES, {"residual": "norm_of_exact"}),
        "fused_add_rms_norm_": (HALVES, {"residual": "norm_of_exact"}),
        "gemma_fused_add_rms_norm": (HALVES, {"residual": "norm_of_exact"}),
        "gelu_tanh_and_mul": (HALVES, {}),
        "merge_state": (HALVES, {}),
    },
    "sgl_kernel": {
        "fused_add_rms_norm": (HALVES, {"residual": "norm_of_exact"}),
        "fused_add_rms_norm_": (HALVES, {"residual": "norm_of_exact"}),
        "gemma_fused_add_rms_norm": (HALVES, {"residual": "norm_of_exact"}),
        "gelu_tanh_and_mul": (ALL, {}),
        "merge_state": (ALL, {}),
        "topk_softmax": (ALL, {}),
    },
}
"""Dtypes of kernels that no call is given to, and what their contracts differ in."""
REFUSED_CELLS = [
    (backend, op, dtype, contract)
    for backend, ops in REFUSED.items()
    for op, (dtypes, contract) in ops.items()
    for dtype in dtypes
]


@pytest.fixture
def model(backend: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(backend)


@pytest.mark.parametrize(("backend", "op", "dtype"), SAMPLED)
def test_right_where_it_is_taken(model: Any, backend: str, op: str, dtype: str) -> None:
    subject = examples.direct(op, backend)
    own = list(examples.specs(op, dtype))
    tally = examples.examine(subject, op, own, laws=False)
    assert tally.executed >= len(own) // 2, tally.refused
    examples.examine(subject, op, [*own[::7], *examples.covering(op, dtype)])
    examples.examine(subject, op, examples.special(op, dtype), laws=False)
    assert model.called


@pytest.mark.parametrize(("backend", "op"), [(b, op) for b, ops in TAKEN.items() for op in ops])
def test_other_dtypes_are_refused(model: Any, backend: str, op: str) -> None:
    subject = examples.direct(op, backend)
    for other in FLOATS:
        if other not in TAKEN[backend][op]:
            first = next(examples.specs(op, other))
            (reason,) = examples.examine(subject, op, [first], laws=False).refused
            assert f"dtype torch.{other}" in reason


@pytest.mark.parametrize(("backend", "op", "dtype", "contract"), REFUSED_CELLS)
def test_right_by_its_own_contract_where_it_is_refused(
    model: Any, backend: str, op: str, dtype: str, contract: dict[str, Any]
) -> None:
    own = list(examples.specs(op, dtype))
    if op == "gelu_tanh_and_mul":
        own = [spec for spec in own if spec.dim["half"] % 8 == 0]
    subject = examples.direct(op, backend, judged=False)
    tally = examples.examine(subject, op, own, laws=False, **contract)
    assert tally.executed == len(own)
    judged = examples.examine(examples.direct(op, backend), op, own)
    assert judged.executed == 0
    assert all("the op's contract: " in reason for reason in judged.refused) or dtype == "float32"
