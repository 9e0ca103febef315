"""Both backends with their packages on an NVIDIA GPU, against float64.

``python -m benchmarks.warm_flashinfer`` compiles what these need many at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_ops
from torch_ops import CaptureError, Platform, ops
from torch_ops.attention import Attention
from torch_ops.registry import registry
from torch_ops.selector import static_reasons
from torch_ops.testing.registered import registered

from . import examples
from .test_flashinfer_products import products
from .test_translation import CELLS, HALVES

ABSENT = not torch.cuda.is_available() or torch.version.hip is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ABSENT, reason="no NVIDIA GPU on this machine"),
]
BOTH = ("flashinfer", "sgl_kernel")


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    backend = request.getfixturevalue("backend")
    reasons = static_reasons(registry.find("rms_norm", backend), Platform.detect())
    if reasons:
        pytest.skip("; ".join(reasons))


@pytest.fixture
def backend() -> str:
    """The backend of tests that aren't of both."""
    return "flashinfer"


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize(("backend", "op", "dtype"), CELLS)
def test_right_where_it_is_taken(backend: str, op: str, dtype: str) -> None:
    own = list(examples.specs(op, dtype))
    if op.startswith("attention") and dtype == "float16":  # each head_dim takes minutes of nvcc
        own = [spec for spec in own if spec.dim["head_dim"] == 128]
    subject = registered(op, backend)
    tally = examples.examine(subject, op, own, device="cuda", laws=False)
    assert tally.executed >= len(own) // 2, tally.refused
    examples.examine(subject, op, own[::7], device="cuda")
    if not op.startswith("attention"):
        examples.examine(subject, op, examples.covering(op, dtype), device="cuda")
    examples.examine(subject, op, examples.special(op, dtype), device="cuda", laws=False)


@pytest.mark.skipif(not ABSENT and torch.cuda.get_device_capability() < (8, 9), reason="no float8")
def test_products_by_one_scale_each() -> None:
    subject = registered("scaled_mm_fp8", "flashinfer")
    examples_of_tensors = products()
    tally = examples.examine(subject, "scaled_mm_fp8", examples_of_tensors, device="cuda")
    assert tally.executed == len(examples_of_tensors), tally.refused
    special = examples.special("scaled_mm_fp8", "bfloat16")
    examples.examine(subject, "scaled_mm_fp8", special, device="cuda", laws=False)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize(
    "op", ["fused_add_rms_norm", "fused_add_rms_norm_", "gemma_fused_add_rms_norm"]
)
@pytest.mark.parametrize("dtype", HALVES)
def test_the_norm_of_an_unrounded_sum(backend: str, op: str, dtype: str) -> None:
    """Refused, as it isn't the op's contract; it is right by another one."""
    subject = examples.direct(op, backend, judged=False)
    own = list(examples.specs(op, dtype))
    examples.examine(subject, op, own, device="cuda", laws=False, residual="norm_of_exact")


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("dtype", HALVES)
def test_merging_parts_with_keys(backend: str, dtype: str) -> None:
    subject = examples.direct("merge_state", backend, judged=False)
    own = list(examples.specs("merge_state", dtype))
    examples.examine(subject, "merge_state", own, device="cuda", laws=False)


@pytest.mark.parametrize("family", ["flashinfer_fa2", "flashinfer_fa3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_layers(backend: str, family: str, batch: int) -> None:
    layer = Attention(8, 128, 2, is_causal=True, backend=family)
    spec = examples.attention(batch=batch, queries=65, keys=130, kv_heads=2, group=4, head_dim=128)

    def run(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return layer(q, k, v)

    subject = examples.function(run)
    examples.examine(subject, "attention", [spec], device="cuda", laws=False)
    assert layer.backend.value == family


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "torch"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [100, 128, 192, 384, 2048])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sequence_next_to_nan(backend: str, head_dim: int, keys: int, is_causal: bool) -> None:
    """Tiles that reach over a sequence's end weigh what lies there by zero, and NaN stays NaN."""
    q, k, v = (new(2, keys, heads, head_dim) for heads in (4, 2, 2))
    wanted = registered("attention", backend).call(q, k, v, is_causal)
    k[1] = v[1] = torch.nan
    found = registered("attention", backend).call(q, k, v, is_causal)
    assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("backend", BOTH)
def test_offsets_beyond_31_bits(backend: str) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 2**34:
        pytest.skip(f"{free} bytes of GPU memory are free, 16 GiB are needed")
    rows = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device="cuda")
    x = rows.as_strided((2, 4096), (2**31, 1))
    x.normal_()
    weight = new(4096)
    got = ops.rms_norm(x, weight, backend=backend)
    assert torch.equal(got, ops.rms_norm(x.contiguous(), weight, backend=backend))


@pytest.mark.parametrize("backend", BOTH)
def test_the_current_device_is_another_one(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, weight = torch.randn(3, 64, device="cuda:1"), torch.randn(64, device="cuda:1")
    half, half_weight = x.half(), weight.half()
    calls: list[Callable[[str], torch.Tensor]] = [
        lambda b: ops.rms_norm(half, half_weight, backend=b),
        lambda b: ops.silu_and_mul(half, backend=b),
    ]
    if backend == "sgl_kernel":
        calls.append(lambda b: ops.fused_add_rms_norm(x, x, weight, backend=b)[0])
    for call in calls:
        torch.testing.assert_close(call(backend), call("torch"))
        assert torch.cuda.current_device() == 0


def test_batches_in_a_capture(backend: str) -> None:
    q, k = new(2, 16, 4, 128), new(2, 32, 2, 128)
    wanted = ops.attention(q, k, k, backend=backend)
    other, other_k = new(3, 16, 4, 128), new(3, 32, 2, 128)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.attention(q, k, k, backend=backend)
        with pytest.raises(CaptureError, match="isn't planned"):
            ops.attention(other, other_k, other_k, backend=backend)
    got.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, wanted)
    assert torch_ops.explain("attention", q, k, k, backend=backend).chosen == backend
