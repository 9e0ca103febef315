"""AITER's backend without AITER: what it takes, what it hands over, and that it runs on ROCm."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ops
from torch_ops import BackendUnavailableError, Platform, discovery
from torch_ops.declarations import catalogue
from torch_ops.once import KernelLoadError
from torch_ops.registry import registry
from torch_ops.testing.draw import FLOATS
from torch_ops.testing.proof import proof_of
from torch_ops.testing.proofs._scaled_mm import plain
from torch_ops.testing.spec import Operand, Spec

from . import examples, sites
from .arguments import BRAIN, FULL, big, off, strided, t
from .model_aiter import RECORDED, Model

HALVES = ("float16", "bfloat16")
ALL = ("float32", *HALVES)
TAKEN: dict[str, tuple[str, ...]] = {
    "append_paged_kv_": ALL,
    "fused_add_rms_norm": ("float32",),
    "fused_add_rms_norm_": ("float32",),
    "gelu_and_mul": ALL,
    "gelu_tanh_and_mul": ALL,
    "gemma_fused_add_rms_norm": ("float32",),
    "gemma_rms_norm": HALVES,
    "quantize_fp8_per_group": HALVES,
    "quantize_fp8_per_tensor": ("float16",),
    "rms_norm": ALL,
    "scaled_mm_fp8": HALVES,
    "scaled_mm_int8": HALVES,
    "silu_and_mul": ALL,
}
"""Dtypes that calls of each op are taken in."""
SERVED = [op for op in registry.ops() if "aiter" in [s.backend.value for s in registry.get(op)]]
MI300, MI350 = Platform.rocm("gfx942:sramecc+:xnack-"), Platform.rocm("gfx950")


def refusal(op: str, *args: Any) -> str | None:
    return examples.refusal(op, "aiter", *args)


def run(op: str, *args: Any) -> Any:
    return examples.loaded(op, "aiter").function(*args)


def test_what_it_serves_and_what_it_declines() -> None:
    declined = discovery.packages()["aiter"].declined
    assert set(SERVED) == set(TAKEN) == set(catalogue()) - set(declined)


@pytest.mark.parametrize("name", RECORDED)
def test_the_model_has_the_recorded_signatures(name: str) -> None:
    found = inspect.signature(getattr(Model(), name))
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    shown = str(found.replace(parameters=bare, return_annotation=found.empty))
    assert shown == f"({RECORDED[name].parameters})"
    assert len(RECORDED[name].commit) == 40


def specs(op: str, dtype: str) -> Iterator[Spec]:
    """Give examples that its kernels take: rows of whole vectors, one after the other."""
    if op.startswith("scaled_mm"):
        kind = "int8" if op.endswith("int8") else "float8_e4m3fn"
        for m, n, k in ((1, 16, 256), (3, 32, 512), (33, 144, 256), (129, 16, 768)):
            yield plain(op, kind, {"m": m, "n": n, "k": k}, dtype, bias=False)
    elif op == "quantize_fp8_per_tensor":
        for tokens, hidden in ((1, 16), (3, 128), (16, 4096)):
            looks = {"x": Operand(dtype), "scale": Operand("float32", regime="near_one")}
            yield Spec.of(op, {"tokens": tokens, "hidden": hidden}, looks, {})
    else:
        small = proof_of(op).small_named(dtype) if op == "append_paged_kv_" else None
        for spec in small or examples.specs(op, dtype):
            plain_rows = all(o.layout == "contig" for _, o in spec.operands)
            if plain_rows and spec.dim.get("size", 32) >= 32:
                yield spec


@pytest.mark.parametrize(("op", "dtype"), [(op, d) for op, dtypes in TAKEN.items() for d in dtypes])
def test_right_where_it_is_taken(aiter: Model, op: str, dtype: str) -> None:
    subject = examples.direct(op, "aiter")
    own = list(specs(op, dtype))
    tally = examples.examine(subject, op, own, laws=False)
    assert tally.executed >= len(own) // 2, tally.refused
    examples.examine(subject, op, own[::5])
    examples.examine(subject, op, proof_of(op).zero(dtype), laws=False)
    assert aiter.called


@pytest.mark.parametrize("op", TAKEN)
def test_other_dtypes_are_refused(op: str) -> None:
    subject = examples.direct(op, "aiter")
    for other in FLOATS:
        if other not in TAKEN[op]:
            first = next(specs(op, other))
            (reason,) = examples.examine(subject, op, [first], laws=False).refused
            assert f"dtype torch.{other}" in reason


x, w = t(3, 64), t(64)
full = t(3, 64, dtype=FULL)
a8, b8 = torch.zeros(3, 256, dtype=torch.int8), torch.zeros(32, 256, dtype=torch.int8).t()
ones = (torch.ones(3, 1), torch.ones(1, 32))
cache = t(4, 16, 2, 8)
slots = torch.zeros(3, dtype=torch.int64)
rows = t(3, 2, 8)
MANY = "(supported: up to 2147483648, offsets are 32 bits wide)"
REFUSED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "weight": ("rms_norm", (x,), "weight None (required by the kernel)"),
    "weight dtype": (
        "rms_norm", (full, w),
        "weight dtype torch.float16 (supported: torch.float32, that of x); convert the weight",
    ),
    "width": (
        "rms_norm", (t(3, 60), t(60)),
        "x of width 60 (supported: multiples of 8 in torch.float16)",
    ),
    "strides": (
        "rms_norm", (t(3, 128)[:, :64], w),
        "x strides (128, 1) for shape [3, 64] (supported: contiguous)",
    ),
    "pointer": ("rms_norm", (off(x), w), "x is aligned to 2 bytes (supported: 16)"),
    "weight pointer": ("rms_norm", (x, off(w)), "weight is aligned to 2 bytes (supported: 16)"),
    "offsets": ("rms_norm", (big(2**26, 64), big(64)), f"x of {2**32} elements {MANY}"),
    "long rows": (
        "gemma_rms_norm", (t(3, 8200), t(8200)),
        "rows of 8200 (supported: up to 8192, kept in registers)",
    ),
    "unrounded sum": (
        "fused_add_rms_norm", (x, x, w),
        "x dtype torch.float16: the norm is of x + residual before the sum is rounded "
        "(the op's contract: norm_of_rounded)",
    ),
    "residual": (
        "fused_add_rms_norm_", (full, strided(full, 80, 1), t(64, dtype=FULL)),
        "residual strides (80, 1) for shape [3, 64] (supported: contiguous)",
    ),
    "gate": (
        "silu_and_mul", (t(3, 24),), "x of width 24 (supported: multiples of 16 in torch.float16)",
    ),
    "group": ("quantize_fp8_per_group", (x, 16), "group_size 16 (supported: 32, 64, 128)"),
    "no scale": (
        "quantize_fp8_per_tensor", (x,),
        "scale None (required: that of zeros would be 0, the op's contract: 1e-10 / largest)",
    ),
    "codes": (
        "quantize_fp8_per_tensor", (t(3, 24), torch.ones(1)),
        "x of width 24 (supported: multiples of 16)",
    ),
    "out": (
        "scaled_mm_int8", (a8, b8, *ones, FULL),
        "out_dtype torch.float32 (supported: torch.float16, torch.bfloat16)",
    ),
    "bias": (
        "scaled_mm_int8", (a8, b8, *ones, BRAIN, torch.ones(32)),
        "a bias torch.float32 (supported: None)",
    ),
    "codes of another device": (
        "scaled_mm_fp8",
        (a8.view(torch.float8_e4m3fnuz), b8.t().view(torch.float8_e4m3fnuz).t(), *ones, BRAIN),
        "a dtype torch.float8_e4m3fnuz (supported: torch.float8_e4m3fn, that of the device)",
    ),
    "scales": (
        "scaled_mm_int8", (a8, b8, torch.ones(1), ones[1], BRAIN),
        "scale_a of shape [1] with strides (1,) (supported: [3, 1], contiguous)",
    ),
    "depth": (
        "scaled_mm_int8", (a8[:, :128].contiguous(), b8[:128], *ones, BRAIN),
        "K 128 and N 32 (supported: multiples of 256 and of 16)",
    ),
    "rows of a": (
        "scaled_mm_int8", (a8.t().contiguous().t(), b8, *ones, BRAIN),
        "a strides (1, 3) for shape [3, 256] (supported: row-major, contiguous)",
    ),
    "columns of b": (
        "scaled_mm_int8", (a8, b8.contiguous(), *ones, BRAIN),
        "b strides (32, 1) for shape [256, 32] (supported: column-major, contiguous)",
    ),
    "pointer of b": (
        "scaled_mm_int8", (a8, off(b8.t()).t(), *ones, BRAIN),
        "b is aligned to 1 bytes (supported: 16)",
    ),
    "values": (
        "append_paged_kv_", (rows, t(3, 2, 4), cache, t(4, 16, 2, 4), slots),
        "v of shape [3, 2, 4] (supported: [3, 2, 8], that of k)",
    ),
    "heads": (
        "append_paged_kv_", (t(3, 2, 16)[..., :8], rows, cache, cache, slots),
        "k strides (32, 16, 1) for shape [3, 2, 8] (supported: tokens of contiguous heads)",
    ),
    "pages": (
        "append_paged_kv_", (rows, rows, cache, t(4, 2, 16, 8).transpose(1, 2), slots),
        "v_cache strides (256, 8, 128, 1) for shape [4, 16, 2, 8] (supported: contiguous pages)",
    ),
    "distance of pages": (
        "append_paged_kv_", (rows, rows, cache, t(8, 16, 2, 8)[::2], slots),
        "v_cache strides (512, 16, 8, 1) for shape [4, 16, 2, 8] "
        "(supported: pages 256 apart, as k_cache)",
    ),
    "slots": (
        "append_paged_kv_", (rows, rows, cache, cache, torch.zeros(6, dtype=torch.int64)[::2]),
        "slot_mapping strides (2,) for shape [3] (supported: contiguous)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("op", "args", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(op: str, args: tuple[Any, ...], reason: str) -> None:
    assert refusal(op, *args) == reason


def test_what_it_takes() -> None:
    strided_pages = t(4, 2, 16, 2, 8).unbind(1)
    packed = t(3, 6, 8)
    for op, args in (
        ("rms_norm", (x[0], w)),
        ("rms_norm", (x[:0], w)),
        ("rms_norm", (t(3, 0), t(0))),
        ("rms_norm", (big(2**25, 64), big(64))),
        ("gemma_rms_norm", (t(2, 3, 8192), t(8192))),
        ("quantize_fp8_per_tensor", (t(0, 3), torch.ones(1))),
        ("scaled_mm_int8", (a8[:0], b8, ones[0][:0], ones[1], BRAIN)),
        ("append_paged_kv_", (packed[:, :2], packed[:, 2:4], *strided_pages, slots)),
    ):
        assert refusal(op, *args) is None


@pytest.mark.parametrize("op", ["rms_norm", "gemma_rms_norm", "silu_and_mul", "gelu_tanh_and_mul"])
def test_results_that_are_cut_are_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = {dtype: (t(3, 64, dtype=dtype), t(64, dtype=dtype)) for dtype in (x.dtype, BRAIN)}
    count = 2 if op.endswith("norm") else 1
    for arch, cut in (("gfx942", True), ("gfx950", False)):
        monkeypatch.setattr(examples.part("aiter", "_rows"), "arch", lambda x, arch=arch: arch)
        assert refusal(op, *args[x.dtype][:count]) is None
        assert refusal(op, *args[BRAIN][:count]) == (
            "x dtype torch.bfloat16 on gfx942 (supported: on gfx950; results are cut, the op's "
            "contract: rounded)"
            if cut
            else None
        )
    monkeypatch.undo()
    assert examples.part("aiter", "_rows").arch(x) is None


def test_what_is_handed_over(aiter: Model) -> None:
    pair = t(3, 64, dtype=FULL), t(64, dtype=FULL)
    run("rms_norm", x, w, 0.5)
    run("gemma_rms_norm", t(2, 3, 64), w)
    run("fused_add_rms_norm_", pair[0], pair[0].clone(), pair[1], 0.25)
    run("gemma_fused_add_rms_norm", pair[0], pair[0], pair[1])
    run("quantize_fp8_per_group", x, 32)
    run("scaled_mm_int8", a8, b8, *ones, BRAIN)
    run("append_paged_kv_", rows, rows, cache, cache.clone(), slots)
    assert aiter.called == [
        ("rms_norm", 0.5),
        ("rmsnorm", 1e-6, True),
        ("fused_add_rms_norm_cu", 0.25),
        ("rmsnorm2d_fwd_with_add", 1e-6, True),
        ("per_group_quant_hip", torch.float8_e4m3fn, 32),
        ("gemm_a8w8", BRAIN),
        ("reshape_and_cache_flash",),
    ]


def test_nothing_is_loaded_for_nothing(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", None)
    none = full[:0]
    run("rms_norm", x[:0], w)
    run("gemma_rms_norm", x[:0], w)
    run("fused_add_rms_norm", none, none, w)
    run("fused_add_rms_norm_", none, none, w)
    run("silu_and_mul", t(3, 0))
    run("quantize_fp8_per_group", x[:0], 32)
    run("quantize_fp8_per_tensor", x[:0], torch.ones(1))
    run("scaled_mm_int8", a8[:0], b8, ones[0][:0], ones[1], BRAIN)
    run("append_paged_kv_", rows[:0], rows[:0], cache, cache, slots[:0])


def test_a_package_that_does_not_load(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", None)
    with pytest.raises(KernelLoadError, match="AITER's rms_norm: ModuleNotFoundError: "):
        run("rms_norm", x, w)


def test_a_package_that_lacks_a_function(aiter: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["aiter"], "rms_norm")
    with pytest.raises(KernelLoadError, match="AITER's rms_norm: AttributeError: "):
        run("rms_norm", x, w)
    run("silu_and_mul", x)


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """AITER is found; importing it fails the test."""
    sites.install(tmp_path, "aiter")
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch_ops.refresh()
    yield
    assert "aiter" not in sys.modules
    monkeypatch.undo()
    torch_ops.refresh()


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("op", SERVED)
def test_where_it_runs(op: str) -> None:
    for platform in (MI300, MI350):
        spec = torch_ops.select_kernel(op, "aiter", platform=platform)
        assert spec.target == f"torch_ops.backends.aiter.{op}:{op}"
        assert torch_ops.select_kernel(op, platform=platform).backend == "aiter"
    elsewhere = {
        Platform.cpu(): "ROCm only (device is 'cpu')",
        Platform.cuda((9, 0)): "ROCm only (device is 'cuda')",
        Platform.rocm("gfx1100"): "arch gfx1100 (supported: gfx942, gfx950)",
    }
    for platform, reason in elsewhere.items():
        with pytest.raises(BackendUnavailableError) as raised:
            torch_ops.select_kernel(op, "aiter", platform=platform)
        assert raised.value.reasons == (reason,)


def test_other_packages_of_this_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of asynchronous iterators has the name, too."""
    (tmp_path / "aiter.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch_ops.refresh()
    with pytest.raises(BackendUnavailableError) as raised:
        torch_ops.select_kernel("rms_norm", "aiter", platform=MI300)
    assert raised.value.reasons == (
        "amd-aiter of unknown version: 'aiter' has no metadata (supported: at least 0.1.19, below "
        "0.2)",
    )
    monkeypatch.undo()
    torch_ops.refresh()
