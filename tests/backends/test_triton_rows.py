"""Triton kernels of norms, gates, rope and merging: interpreted, compiled for absent GPUs, run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from torch_ops import ops
from torch_ops.platform import Platform
from torch_ops.testing.arguments import build
from torch_ops.testing.spec import Operand, Spec

from . import examples, rows_compiled, rows_interpreted, workers

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """What the interpreter's processes found."""
    return workers.in_processes("rows_interpreted", TRITON_INTERPRET="1", PYTHONWARNINGS="ignore")


@pytest.fixture(scope="module")
def compiled() -> dict[str, str | None]:
    """What the compiling processes found; Triton's cache is kept between runs."""
    return workers.in_processes(
        "rows_compiled", TRITON_CACHE_DIR=str(workers.ROOT / ".cache" / "triton")
    )


@pytest.mark.timeout(900)  # the first of them waits for all
@pytest.mark.parametrize("check", rows_interpreted.checks())
def test_interpreted(interpreted: dict[str, str | None], check: str) -> None:
    assert check in interpreted, f"not run; there are {len(interpreted)}"
    assert interpreted[check] is None, interpreted[check]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", rows_compiled.checks())
def test_compiles(compiled: dict[str, str | None], check: str) -> None:
    assert check in compiled, f"not run; there are {len(compiled)}"
    assert compiled[check] is None, compiled[check]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_interpreted_in_every_dtype() -> None:
    flags = {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    workers.everything(rows_interpreted, **flags)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_compiles_in_every_dtype() -> None:
    cache = str(workers.ROOT / ".cache" / "triton")
    workers.everything(rows_compiled, TRITON_CACHE_DIR=cache)


def test_a_cpu_is_refused_with_what_to_do() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(torch_ops.BackendUnavailableError) as caught:
        ops.rms_norm(x, backend="triton")
    assert any("set TRITON_INTERPRET=1 before Python starts" in r for r in caught.value.reasons)


def test_an_old_gpu_is_refused() -> None:
    with pytest.raises(torch_ops.BackendUnavailableError, match="sm_75 is too old"):
        torch_ops.select_kernel("rms_norm", "triton", platform=Platform.cuda((7, 5)))


@pytest.mark.parametrize("platform", [Platform.cuda((8, 0)), Platform.rocm("gfx942")], ids=str)
@pytest.mark.parametrize("op", rows_interpreted.OPS)
def test_chosen_on_gpus_without_importing_a_kernel(op: str, platform: Platform) -> None:
    spec = torch_ops.select_kernel(op, "triton", platform=platform)
    assert spec.target == f"torch_ops.backends.triton.{op}:{op}"


def test_unavailable_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module(rows_compiled.BACKEND)
    assert package.available() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert package.available().startswith("not installed: no module named 'triton'")


def _as_rows(*tensors: Tensor, lane: int = 1) -> Any:
    return importlib.import_module(f"{rows_compiled.BACKEND}._rows").as_rows(tensors, lane)


PACKED = torch.arange(4 * 6 * 64).view(4, 6, 64)


@pytest.mark.parametrize(
    "view",
    [
        PACKED,
        PACKED[:, :, 8:24],
        PACKED[:, 1:3],
        PACKED[:, 1:3, 16:32],
        PACKED[0, 0],
        PACKED[::2, 3],
        PACKED[:1, :, :16],
        PACKED[:, :1].expand(4, 5, 64),
        PACKED.view(2, 2, 6, 64)[:, :, ::2],
        PACKED.as_strided((1, 64), (2**31, 1)),
    ],
    ids=lambda view: f"{list(view.shape)}-{view.stride()}",
)
@pytest.mark.parametrize("lane", [1, 8])
def test_rows_are_found_without_copying(view: Tensor, lane: int) -> None:
    rows = _as_rows(view, lane=lane)
    assert rows.tensors[0] is view
    assert torch.equal(_gathered(rows, 0), view.reshape(-1, view.shape[-1]))


def _gathered(rows: Any, index: int) -> Tensor:
    """Read the rows as a kernel does."""
    tensor, lanes = rows.tensors[index], rows.lanes * rows.lane
    number = torch.arange(rows.total)
    start = number * rows.step[index]
    if rows.inner:
        start = number // rows.inner * rows.outer[index] + number % rows.inner * rows.step[index]
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    found: Tensor = flat[
        tensor.storage_offset() + (start * rows.lane)[:, None] + torch.arange(lanes)
    ]
    return found


@pytest.mark.parametrize(
    "view",
    [
        PACKED.transpose(1, 2),
        PACKED[..., ::2],
        PACKED.view(2, 2, 2, 3, 64)[:, :1, :, :2].transpose(0, 2),
        PACKED.view(4, 2, 3, 64)[::2, :, :2, :32],
    ],
    ids=lambda view: f"{list(view.shape)}-{view.stride()}",
)
def test_what_two_strides_do_not_walk_is_copied(view: Tensor) -> None:
    rows = _as_rows(view)
    assert rows.tensors[0] is not view
    assert rows.tensors[0].is_contiguous()
    assert torch.equal(_gathered(rows, 0), view.reshape(-1, view.shape[-1]))


@pytest.mark.parametrize(
    "other", [PACKED[:, 2:4], PACKED[:2].view(4, 3, 64)[:, :2], PACKED[:, ::3]]
)
def test_tensors_share_the_groups_of_rows(other: Tensor) -> None:
    first, plain = PACKED[:, 1:3, :], torch.arange(4 * 2 * 64).view(4, 2, 64)
    rows = _as_rows(first, other, plain)
    assert rows.inner == 2
    for index, tensor in enumerate((first, other, plain)):
        assert torch.equal(_gathered(rows, index), tensor.reshape(-1, 64)), index


def test_misaligned_rows_are_copied_where_lanes_are_wide() -> None:
    buffer = torch.zeros(4 * 16 + 1, dtype=torch.float16)
    view = buffer[1:].view(4, 16)
    assert _as_rows(view, lane=1).tensors[0] is view
    copied = _as_rows(view, lane=8).tensors[0]
    assert copied is not view
    assert copied.data_ptr() % 16 == 0
    odd = torch.zeros(4, 17, dtype=torch.float16)[:, :16]
    assert _as_rows(odd, lane=8).tensors[0] is not odd


def _buffer(*shape: int, shift: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    """A tensor that starts `shift` elements after a multiple of 16 bytes."""
    count = math.prod(shape)
    return torch.zeros(count + 64, dtype=dtype)[shift : shift + count].view(shape)


def _calls(shift: int) -> dict[str, tuple[Tensor, ...]]:
    """Arguments of every op, fresh ones at each call."""
    x, w = functools.partial(_buffer, 5, 96, shift=shift), functools.partial(_buffer, 96)
    q, k = _buffer(5, 4, 64, shift=shift), _buffer(5, 2, 64)
    lse = functools.partial(_buffer, 5, 4, dtype=torch.float32)
    rope = (q, k, torch.zeros(9, 32), torch.zeros(5, dtype=torch.int64))
    return {
        "rms_norm": (x(), w()),
        "gemma_rms_norm": (x(), w()),
        "layer_norm": (x(), w(), w()),
        "fused_add_rms_norm": (x(), x(), w()),
        "gemma_fused_add_rms_norm": (x(), x(), w()),
        "fused_add_rms_norm_": (x(), x(), w()),
        "silu_and_mul": (x(),),
        "gelu_and_mul": (x(),),
        "quantize_int8_per_token": (x(),),
        "gelu_tanh_and_mul": (x(),),
        "apply_rope": rope,
        "apply_rope_": rope,
        "merge_state": (q, lse(), torch.clone(q), lse()),
    }


@pytest.mark.parametrize("op", rows_interpreted.OPS)
def test_a_repeated_call_launches_the_same_with_its_own_tensors(op: str) -> None:
    kernel = rows_compiled.kernel(op)
    with rows_compiled.recorded() as launches:
        for _ in range(3):
            args = _calls(shift=0)[op]
            kernel(*args)
            given = [v for v in launches[-1].values if isinstance(v, Tensor)]
            for tensor in args:
                assert any(value is tensor for value in given)
    first, *repeated = [(run.variant, [_plain(v) for v in run.values]) for run in launches]
    assert all(run == first for run in repeated)
    assert len(repeated) == 2


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.dtype, value.shape, value.stride()


@pytest.mark.parametrize("op", rows_interpreted.OPS)
def test_a_repeated_call_looks_at_alignment_again(op: str) -> None:
    kernel = rows_compiled.kernel(op)
    with rows_compiled.recorded() as launches:
        kernel(*_calls(shift=0)[op])
        kernel(*_calls(shift=1)[op])
        kernel(*_calls(shift=0)[op])
    aligned, other, again = launches
    assert again.variant is aligned.variant
    rope = op.startswith("apply_rope")
    assert (other.variant is not aligned.variant) == rope
    if not rope:
        addresses = [v.data_ptr() for v in other.values if isinstance(v, Tensor)]
        assert not any(address % 16 for address in addresses)


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)


def _kernel(op: str) -> Callable[..., Any]:
    return torch_ops.get_kernel(op, "triton")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("op", "shape", "vectors"),
    [
        ("rms_norm", (65537 + 7, 32768), 1),
        ("layer_norm", (524289 + 7, 4096), 2),
        ("silu_and_mul", (61681 + 7, 34816), 0),
    ],
)
def test_offsets_beyond_32_bits(
    device: torch.device, op: str, shape: tuple[int, int], vectors: int
) -> None:
    x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    x[-9:] = torch.randn(9, shape[1], device=device)
    weights = [torch.randn(shape[1], device=device) for _ in range(vectors)]
    kernel = _kernel(op)
    assert x.numel() > 2**31
    whole, few = kernel(x, *weights), kernel(x[-1000:], *weights)
    assert torch.equal(whole[-1000:], few)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(600, n) for n in (4096, 5000, 5120, 8192, 16384, 18432, 32768)]
    + [(4, 4096), (2, 20480), (9, 20480)],
)
def test_rows_quantized_at_once_are_those_of_two_kernels(
    device: torch.device, shape: tuple[int, int], kind: torch.dtype
) -> None:
    for both in (rows_interpreted.norms_at_once, rows_interpreted.gates_at_once):
        with torch.device(device):
            found, wanted = both(shape, 1, kind)
        assert all(map(torch.equal, found, wanted)), both


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("op", "tokens", "hidden"),
    [
        ("rms_norm", 1029, 4096),
        ("rms_norm", 301, 20480),
        ("layer_norm", 1029, 5120),
        ("layer_norm", 20011, 128),
        ("layer_norm", 9, 65536),
    ],
)
def test_gradients_of_rows_that_programs_share(
    device: torch.device, op: str, tokens: int, hidden: int
) -> None:
    """Each program takes several rows, and several of them are added up: twice the same bits."""
    vectors = {"weight": Operand("float32", regime="near_one")}
    vectors |= {"bias": Operand("float32")} if op == "layer_norm" else {}
    params = {"eps": 1e-6} | ({"one_plus": True} if op == "rms_norm" else {})
    operands = {"x": Operand("bfloat16"), "grad": Operand("bfloat16"), **vectors}
    dims = {"tokens": tokens, "hidden": hidden}
    spec = Spec.of(f"{op}_backward", dims, operands, params)
    kernel = _kernel(f"{op}_backward")
    examples.examine(examples.function(kernel), f"{op}_backward", [spec], device=device, laws=False)
    args = list(build(spec, device).values())
    for found, again in zip(kernel(*args), kernel(*args), strict=True):
        assert torch.equal(found, again)


@pytest.mark.gpu
@needs_gpu
def test_an_unused_row_stride_may_exceed_32_bits(device: torch.device) -> None:
    x = torch.randn(1, 128, device=device).half()
    far = x.as_strided((1, 128), (2**31, 1))
    assert torch.equal(_kernel("rms_norm")(far), _kernel("rms_norm")(x))


@pytest.mark.gpu
@needs_gpu
def test_a_capture_replays_and_refuses_to_compile(device: torch.device) -> None:
    kernel = _kernel("rms_norm")
    x = torch.randn(5, 640, device=device)
    cold = torch.randn(5, 641, device=device, dtype=torch.float64)
    kernel(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(x)
        with pytest.raises(torch_ops.errors.CaptureError, match="prepare first"):
            kernel(cold)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, kernel(x))


@pytest.mark.gpu
@needs_gpu
def test_profilers_see_every_launch(device: torch.device) -> None:
    import triton

    kernel = _kernel("rms_norm")
    seen: list[Any] = []
    x = torch.randn(3, 256, device=device)
    expected = kernel(x)
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        assert torch.equal(kernel(x), expected)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1
    assert torch.equal(kernel(x), expected)
    assert len(seen) == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul"])
def test_tensors_on_another_device_than_the_current(op: str) -> None:
    x = torch.randn(5, 256)
    first, second = (x.to(torch.device("cuda", index)) for index in (0, 1))
    expected = _kernel(op)(first)
    for _ in range(2):
        found = _kernel(op)(second)
        assert found.device == second.device
        assert torch.equal(found.cpu(), expected.cpu())
    assert torch.cuda.current_device() == 0
