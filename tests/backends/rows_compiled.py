"""Compile what the Triton row ops launch, for GPUs that aren't there.

Writes one JSON object: check -> what broke.
The ops run on CPU tensors with the launch replaced, so that what is compiled is what they ask for:
dtypes, constants and threads of each variant.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import workers

BACKEND = "torch_ops.backends.triton"
ROTATED = "apply_rope_append_paged_kv_"
DTYPES = ("float16", "bfloat16", "float32", "float64")
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
LAYOUTS = ("sm_90", "gfx942")
"""Where all that differs by layout alone is compiled, if all is: one target of each maker."""
SHARES = {
    "sm_80 bfloat16": (0, 3), "sm_90 bfloat16": (1, 3), "sm_100 bfloat16": (2, 3),
    "gfx942 bfloat16": (0, 2), "gfx950 bfloat16": (1, 2),
    "sm_80 float16": (0, 2), "sm_90 float32": (1, 2), "sm_100 float64": (0, 1),
}  # fmt: skip
"""Of the launches of each kernel, the number of the first and the step to the next."""
# Bytes of shared memory of one program: of sm_86 and sm_89, too, which run what is made for sm_80.
SHARED = {
    "sm_80": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840,
}  # fmt: skip
KERNELS = frozenset(
    {
        "whole",
        "held",
        "looped",
        "stats",
        "apply",
        "_gate",
        "_rotate",
        "_rotate_and_append",
        "_merge",
        "sizes",
        "encoded",
        "_gate_codes",
        "_held_gate_codes",
        "_gate_gradient",
        "whole_gradient",
        "gradient_sums",
        "gradient_apply",
        "fold",
    }
)
_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
    torch.float64: "*fp64", torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e4m3fnuz: "*fp8e4b8",
}  # fmt: skip


class Launch(NamedTuple):
    """What an op asked to be launched."""

    variant: Any
    values: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.variant._function.__name__)


def kernel(op: str) -> Callable[..., Any]:
    """Import an op's kernel; the registry has none to offer for a CPU."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"{BACKEND}.{op}"), op)
    return found


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect launches instead of making them."""
    variant = importlib.import_module(f"{BACKEND}._launch").Variant
    launches: list[Launch] = []

    def record(self: Any, _: int, pointers: Any, numbers: Any) -> None:
        launches.append(Launch(self, (*pointers, *numbers, *self.constants)))

    launch = variant.__call__
    variant.__call__ = record
    try:
        yield launches
    finally:
        variant.__call__ = launch


def codes_of(target: str) -> torch.dtype:
    """Give what Triton quantizes to for a target: float8 of its own, int8 where it has none."""
    special = {"sm_80": torch.int8, "gfx942": torch.float8_e4m3fnuz}
    return special.get(target, torch.float8_e4m3fn)


def launches(dtype: str, codes: torch.dtype, layouts: bool = True) -> list[Launch]:
    """Give every kernel for a dtype, and for bfloat16, if asked for, what differs by layout."""
    kind = getattr(torch, dtype)
    with recorded() as found:
        _norms(kind)
        for op in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
            x = torch.zeros(600, 2048, dtype=kind)
            kernel(op)(x)
            kernel(f"{op}_backward")(x, x[:, :1024])
        _heads(kind)
        if kind != torch.float64:
            _quantized(kind, codes)
        if layouts and kind == torch.bfloat16:
            _layouts()
    return found


def _norms(kind: torch.dtype) -> None:
    x, w = torch.zeros(600, 1024, dtype=kind), torch.zeros(1024, dtype=kind)
    kernel("layer_norm")(x, w, w)
    kernel("fused_add_rms_norm")(x, x.clone(), w)
    kernel("layer_norm_backward")(x, x, w, w)
    padded = torch.zeros(1, 2560, dtype=kind).expand(600, 2560)
    kernel("fused_add_rms_norm")(padded, padded, padded[0])
    long, gain = torch.zeros(40, 20480, dtype=kind), torch.zeros(20480, dtype=torch.float32)
    kernel("layer_norm")(long, gain, gain)
    kernel("fused_add_rms_norm")(long[:2], long[2:4], gain)
    kernel("layer_norm_backward")(long, long, gain, None)


def _quantized(kind: torch.dtype, codes: torch.dtype) -> None:
    quantize = importlib.import_module(f"{BACKEND}._quantization")
    many = torch.zeros(600, 4096, dtype=kind)
    quantize.quantize_groups(many[:, :256], 128, codes)
    quantize.quantize_tensor(many, None, codes)
    quantize.quantize_tensor(many[:, :33], torch.ones(()), codes)
    quantize.quantize_rows(torch.zeros(3, 20480, dtype=kind), codes)
    quantize.quantize_rows(many[:, :33], torch.int8)
    padded = torch.zeros(1, 5120, dtype=kind).expand(600, 5120)
    quantize.quantize_rows(padded[:, :2560], codes)
    fused = importlib.import_module(f"{BACKEND}._norm_quantization")
    fused.normalize_quantize(padded[:, :2560], padded[0, :2560], 1e-6, codes)
    fused.add_normalize_quantize(many, many, many[0], 1e-6, codes)
    given = quantize.Scales(given=torch.ones(()))
    fused.normalize_quantize(many[:, :33], many[0, :33], 1e-6, codes, given)
    long, gain = torch.zeros(9, 20479, dtype=kind), torch.zeros(20480, dtype=kind)
    fused.add_normalize_quantize(long, long, gain[:-1], 1e-6, codes)
    fused.normalize_quantize(gain.expand(9, 20480), gain, 1e-6, codes)
    gates = importlib.import_module(f"{BACKEND}._gate_quantization")
    gates.gated_quantize(many[:, :66], 0, codes, given)
    gates.gated_quantize(many, 0, codes)
    gates.gated_quantize(padded, 0, codes)
    fused.normalize_quantize(many[:1, :1], many[0, :1], 1e-6, codes)  # of one number
    gates.gated_quantize(many[:1, :2], 0, codes)
    if kind == torch.bfloat16:
        groups = quantize.Scales(group=128)
        fused.add_normalize_quantize(many, many, many[0], 1e-6, codes, groups)
        fused.normalize_quantize(gain.expand(9, 20480), gain, 1e-6, codes, groups)
        gates.gated_quantize(many, 0, codes, groups)
        wide = torch.zeros(1, 16384, dtype=kind).expand(600, 16384)
        fused.add_normalize_quantize(wide, wide, wide[0], 1e-6, codes)
        fused.add_normalize_quantize(wide, wide, wide[0].float(), 1e-6, codes, groups)
        fused.normalize_quantize(wide, wide[0], 1e-6, codes, given)
        gates.gated_quantize(wide.repeat(1, 2), 0, codes)


def _heads(kind: torch.dtype) -> None:
    q, k = torch.zeros(9, 8, 128, dtype=kind), torch.zeros(9, 2, 128, dtype=kind)
    cache, positions = torch.zeros(16, 96), torch.zeros(9, dtype=torch.int64)
    kernel("apply_rope")(q, k, cache, positions, True)
    many = torch.zeros(200, 10, 128, dtype=kind)
    kernel("apply_rope_")(many[:, :8], many[:, 8:], cache, many[:, 0, 0].int(), False)
    pages = torch.zeros(2, 3, 16, 2, 128, dtype=kind)
    kernel(ROTATED)(q, k, k, cache, positions, *pages, positions)
    wide = torch.zeros(16, 128)
    kernel(ROTATED)(q, k, k, wide, positions.int(), *pages, positions, False)
    kernel("merge_state")(q, q[..., 0].float(), q, q[..., 0].float())


def _layouts() -> None:
    """Few rows, plain weights, in place, nested rows, and sizes that no 16 bytes divide."""
    x = torch.zeros(4, 6, 1024, dtype=torch.bfloat16)
    kernel("rms_norm")(x)
    kernel("gemma_rms_norm")(x[:, :2, :512], torch.zeros(512))
    kernel("fused_add_rms_norm_")(x[0], x[1], torch.zeros(1024))
    kernel("gemma_fused_add_rms_norm")(x[0], x[1], torch.zeros(1024))
    kernel("layer_norm")(torch.zeros(3, 20480, dtype=torch.bfloat16))
    kernel("rms_norm")(torch.zeros(40, 20479, dtype=torch.bfloat16))
    many = torch.zeros(600, 8192, dtype=torch.bfloat16)
    kernel("rms_norm")(many)
    kernel("fused_add_rms_norm")(many, many, torch.zeros(8192))
    odd = torch.zeros(7, 3, 2 * 33, dtype=torch.bfloat16)
    kernel("rms_norm")(odd)
    kernel("rms_norm_backward")(odd, odd, None, odd)
    kernel("rms_norm_backward")(many, many, torch.zeros(8192), many, 1e-6, True)
    kernel("silu_and_mul")(odd)
    kernel("merge_state")(odd, odd[..., 0].float(), odd, odd[..., 0].float())
    for is_neox in (True, False):
        kernel("apply_rope")(
            odd, odd, torch.zeros(4, 34), torch.zeros(7, dtype=torch.int64), is_neox
        )
        pages = torch.zeros(2, 3, 5, 2 * 33, 3, dtype=torch.bfloat16).transpose(3, 4)
        places = torch.zeros(7, dtype=torch.int64)
        kernel(ROTATED)(odd, odd, odd, torch.zeros(4, 34), places, *pages, places, is_neox)


def compiled(launch: Launch, target: str) -> Any:
    """Compile a launch for a target, specialized as Triton does it at the first launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import driver

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    parameters = launch.variant._function.params
    for index, (parameter, value) in enumerate(zip(parameters, launch.values, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type
    source = ASTSource(launch.variant._function, signature, constants, attributes)
    kind, arch, warp = TARGETS[target]
    options = {"num_warps": max(1, launch.variant.threads // warp), **launch.variant._options}
    there = GPUTarget(kind, arch, warp)
    driver.set_active(SimpleNamespace(get_current_target=lambda: there))  # kernels ask for it
    return triton.compile(source, target=there, options=options)


def share(found: list[Launch], first: int, step: int) -> list[Launch]:
    """Give every n-th launch of each kernel, of one that is launched less often one."""
    by_kernel: dict[str, list[Launch]] = {}
    for launch in found:
        by_kernel.setdefault(launch.name, []).append(launch)
    return [
        launch
        for all_of_it in by_kernel.values()
        for launch in all_of_it[first % len(all_of_it) :: step]
    ]


def checks(*, every: bool = False) -> list[str]:
    """Name what is compiled: bfloat16 for each target, each other dtype for one, or every cell.

    Of a maker's targets each compiles every kernel, and all of them what differs within a kernel.
    """
    others = [dtype for dtype in DTYPES if dtype != "bfloat16"]
    return [
        f"{target} {dtype}"
        for i, target in enumerate(TARGETS)
        for dtype in DTYPES
        if every or dtype == "bfloat16" or dtype in others[i : i + 1]
    ]


def run(check: str, *, every: bool = False) -> None:
    """Compile a dtype's launches for a target; raises where one doesn't make machine code."""
    target, dtype = check.split()
    binary = "cubin" if TARGETS[target][0] == "cuda" else "hsaco"
    found = launches(dtype, codes_of(target), not every or target in LAYOUTS)
    if not every:
        found = share(found, *SHARES[check])
    float8 = {"sizes", "encoded", "_gate_codes", "_held_gate_codes"}
    wanted = KERNELS - float8 if dtype == "float64" else KERNELS
    missing = wanted - {launch.name for launch in found}
    if missing:
        raise AssertionError(f"never launched in {dtype}: {sorted(missing)}")
    for launch in found:
        made = compiled(launch, target)
        if made.asm[binary][:4] != b"\x7fELF" or made.metadata.shared > SHARED[target]:
            text = (
                f"shared memory {made.metadata.shared} (at most {SHARED[target]}), or no ELF file"
            )
            raise AssertionError(f"{launch.name} for {target} in {dtype}: {text}")


if __name__ == "__main__":
    every = "--every" in sys.argv
    workers.work(checks(every=every), functools.partial(run, every=every))
