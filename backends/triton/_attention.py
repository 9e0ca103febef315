"""Attention in Triton: which kernel, which tile sizes, and the launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ops.platform import Platform

from ._attention_hopper import Long, describable, fits
from ._attention_kernel import attend
from ._launch import INTERPRETED, WARP, Variant
from ._rows import power_of_two

__all__ = [
    "Config",
    "arch_of",
    "config",
    "forward",
    "in_powers_of_2",
    "packing",
    "positive",
    "refusal",
    "shared_memory",
    "shift_of",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TESTABLE = tuple(d for d in _DTYPES if not INTERPRETED or d != torch.bfloat16)
_LONGEST = 256
_SCALES = 2.0**100
_LOG2_E = math.log2(math.e)
_WIDE = 2**24  # a tile has up to 128 rows
_BYTES = 16
_CONTIGUOUS = torch.contiguous_format
_SMALL_WEIGHTS = 14.0  # 2**14 is the largest power of 2 with room for its neighbours in float16


class Config(NamedTuple):
    """Tile sizes of a kernel.

    Attributes:
        block_m: Rows of a program.
        block_n: Keys of a step.
        warps: Warps of a program.
        stages: Steps whose keys and values are in flight.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


def refusal(dtype: torch.dtype, head_dim: int, value_dim: int, scale: float | None) -> str | None:
    """Give why heads like these can't be served, or None."""
    if (
        dtype in _TESTABLE
        and 0 < head_dim <= _LONGEST
        and 0 < value_dim <= _LONGEST
        and (not scale or 1 / _SCALES <= abs(scale) <= _SCALES)
    ):
        return None
    if dtype not in _DTYPES:
        return f"dtype {dtype} (supported: {', '.join(map(str, _DTYPES))})"
    if dtype not in _TESTABLE:
        return (
            "torch.bfloat16 is untestable in Triton's interpreter, which truncates where a GPU "
            "rounds (supported there: torch.float16, torch.float32)"
        )
    for name, width in (("head_dim", head_dim), ("head_dim of values", value_dim)):
        if not 1 <= width <= _LONGEST:
            return f"{name} {width} (supported: 1 to {_LONGEST})"
    return f"scale {scale} (supported: 0, and magnitudes from 2**-100 to 2**100)"


def shared_memory(arch: str) -> int:
    """Give how many bytes of shared memory a program may have."""
    if arch.startswith("gfx"):
        return 163840 if arch == "gfx950" else 65536
    if arch in ("sm_90", "sm_100", "sm_103"):
        return 232448
    if arch in ("sm_80", "sm_87"):
        return 163840
    return 101376


def config(arch: str | None, itemsize: int, width: int, rows: int, lane: int) -> Config:
    """Choose tile sizes.

    Where elements are loaded one by one, tiles are too small for tensor cores that work on their
    own: on an H200 some rows of values came from elsewhere, or from nowhere (float16, 64 rows,
    head_dim 17 to 31 of values), and not with every launch. Supposed cause: ptxas 12.8 moves such
    loads into products of queries and keys that are under way.

    Args:
        arch: ``"sm_90"``, ``"gfx942"``, None for the interpreter.
        itemsize: Bytes of an element.
        width: Padded length of a head, the longer one of keys' and values'.
        rows: Rows of one head slot.
        lane: Elements that are loaded at once.
    """
    if arch is None:  # the interpreter's time goes by programs and steps, not by elements
        return Config(512 if rows > 64 else 64, 128, 4, 1)
    if itemsize == 4:
        return Config(32 if width <= 128 else 16, 32, 4, 1)
    if lane == 1:
        return Config(32 if rows > 16 else 16, 32, 4, 1)
    few = next((tile for tile in (16, 32, 64) if rows <= tile), 0)
    if arch.startswith("gfx"):
        return Config(few or (128 if width <= 128 else 64), 64 if width <= 128 else 32, 4, 1)
    if few:
        wanted = Config(few, 128 if few == 16 and width <= 128 else 64, 4, 3)
    elif width <= 64:
        wanted = Config(128, 64, 4, 3)
    else:
        wanted = Config(128, 64, 8, 3 if width <= 128 else 2)
    return _fitted(wanted, itemsize * width, shared_memory(arch))


def _fitted(wanted: Config, row_bytes: int, limit: int) -> Config:
    """Take away stages, then keys, then rows, until all of them fit into shared memory."""
    chosen = wanted
    while (chosen.block_m + 2 * chosen.stages * chosen.block_n) * row_bytes > limit - 1024:
        if chosen.stages > 1:
            chosen = chosen._replace(stages=chosen.stages - 1)
        elif chosen.block_n > 32:
            chosen = chosen._replace(block_n=chosen.block_n // 2)
        else:
            chosen = chosen._replace(block_m=chosen.block_m // 2)
    return chosen


def arch_of(device: int) -> str | None:
    """Give a GPU's architecture, of a platform's unknown ones the prefix; None for -1, no GPU."""
    unknown = "gfx" if torch.version.hip else "sm"
    return None if device < 0 else Platform.detect(f"cuda:{device}").arch or unknown


def shift_of(dtype: torch.dtype) -> float:
    """Give the power of 2 that weights are multiplied by, so that small ones aren't subnormal."""
    return _SMALL_WEIGHTS if dtype == torch.float16 else 0.0


def positive(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Give queries and a scale above 0, by which scaled logits are largest where logits are."""
    if scale is None:
        return q, q.shape[-1] ** -0.5
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale else (q * 0, 1.0)


def in_powers_of_2(scale: float, soft_cap: float) -> tuple[float, float]:
    """Give what takes logits to powers of 2, or with a cap to twice their tanh's; and the cap."""
    factor = scale * (2 * _LOG2_E / soft_cap if soft_cap > 0 else _LOG2_E)
    return factor, soft_cap * _LOG2_E


_Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]


def packing(queries: int, group: int) -> int:
    """Choose how many of the query heads that share a key head are attended together."""
    return group if queries * group <= 64 or INTERPRETED else 1


class Call(NamedTuple):
    """All that a launch depends on but addresses. Values have as many heads and rows as keys.

    Attributes:
        shapes, strides: Those of queries, keys and values.
        dtype: Of all of them.
        device: Index of the GPU, -1 on a CPU.
        is_causal, scale, window_left, logits_soft_cap: Arguments of the op; the scale is positive.
        with_lse: Whether the LSE is wanted.
        aligned: Whether all addresses are multiples of 16 bytes.
    """

    shapes: tuple[Sequence[int], ...]
    strides: tuple[Sequence[int], ...]
    dtype: torch.dtype
    device: int
    is_causal: bool
    scale: float
    window_left: int
    logits_soft_cap: float
    with_lse: bool
    aligned: bool


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    window_left: int,
    logits_soft_cap: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend; gives the output and, if wanted, the LSE."""
    shape = q.shape
    out = q.new_empty((*shape[:3], v.shape[3]))
    lse = q.new_empty(shape[:3], dtype=torch.float32) if with_lse else None
    if not k.numel() or not out.numel():
        return out.zero_(), None if lse is None else lse.fill_(-math.inf)
    q, scale = positive(q, scale)
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    options = (is_causal, scale, window_left, logits_soft_cap, with_lse)
    run = _plan(_call(q, k, v, options))
    if run is None:
        q, k, v = (t if _is_regular(t) else t.clone(memory_format=_CONTIGUOUS) for t in (q, k, v))
        run = _plan(_call(q, k, v, options))
        assert run is not None
    run(q, k, v, out, lse)
    return out, lse


def _call(q: Tensor, k: Tensor, v: Tensor, options: tuple[bool, float, int, float, bool]) -> Call:
    return Call(
        (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride()), q.dtype, q.get_device(),
        *options, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % _BYTES == 0,
    )  # fmt: skip


def _is_regular(t: Tensor) -> bool:
    """Whether all heads of a tensor start at multiples of 16 bytes, and none is another."""
    lane = _BYTES // t.element_size()
    steps = [step for n, step in zip(t.shape[:3], t.stride()[:3], strict=True) if n > 1]
    if t.data_ptr() % _BYTES or any(step % lane for step in steps):
        return False
    return not steps or describable(steps)


@functools.lru_cache(maxsize=4096)
def _plan(call: Call) -> _Run | None:
    """Choose a kernel for a call. Planning takes ten times as long as looking a plan up.

    Returns:
        How to run it, or None where only contiguous copies get the kernel that contiguous tensors
        get. Another one sums in another order, and strides are no reason for other results.
    """
    queries, heads, head_dim = call.shapes[0][1:]
    keys, kv_heads, value_dim = call.shapes[2][1:]
    windowed, capped = 0 <= call.window_left < keys, call.logits_soft_cap > 0
    strides = _strides(call)
    lane = _lane(call, strides)
    whole = _BYTES // call.dtype.itemsize
    if lane == 1 and head_dim % whole == 0 and value_dim % whole == 0:
        return None
    window = call.window_left if windowed else -1
    numbers = (*in_powers_of_2(call.scale, call.logits_soft_cap), window)
    flags = (call.is_causal, windowed, capped, call.with_lse, shift_of(call.dtype))
    lasting = [s for s in strides if s is not None]
    if fits(queries, head_dim, value_dim, lane, call.device):
        if not describable(lasting):
            return None
        return Long(call.shapes, call.strides, flags, numbers, call.dtype, call.device)
    group = heads // kv_heads
    pack = packing(queries, group)
    steps = [s or 0 for s in strides]
    variant, block_m = _variant(
        call.dtype, (*flags, pack, head_dim, value_dim, lane, max(steps) >= _WIDE),
        min(queries * pack, 65), call.device,
    )  # fmt: skip
    slots = call.shapes[0][0] * heads // pack
    programs = -(-queries * pack // block_m) * slots
    lengths = (queries, keys, slots, heads // pack, group // pack)
    return _Short(variant, programs, (*numbers, *lengths, *[step // lane for step in steps]))


def _strides(call: Call) -> list[int | None]:
    """Give the strides of all but the last dimensions, None for those of one element."""
    return [
        step if size > 1 else None
        for shape, steps in zip(call.shapes, call.strides, strict=True)
        for size, step in zip(shape[:3], steps[:3], strict=True)
    ]


def _lane(call: Call, strides: Sequence[int | None]) -> int:
    """Give how many elements are 16 bytes if all heads start at multiples of that, or else 1."""
    lane = _BYTES // call.dtype.itemsize
    return lane if call.aligned and not any((step or 0) % lane for step in strides) else 1


@functools.cache
def _variant(
    dtype: torch.dtype, flags: tuple[float, ...], rows: int, device: int
) -> tuple[Variant, int]:
    """Give the kernel for a dtype, flags of `attend` and (up to 65) rows of a slot."""
    block_d, block_v = (max(16, power_of_two(int(width))) for width in flags[6:8])
    chosen = config(arch_of(device), dtype.itemsize, max(block_d, block_v), rows, int(flags[8]))
    constants = (*flags, chosen.block_m, chosen.block_n, block_d, block_v, chosen.stages)
    options = {"enable_fp_fusion": True, "num_stages": chosen.stages}
    threads, aligned = chosen.warps * WARP, flags[8] > 1
    made = attend.variant(constants, threads, device, aligned=aligned, options=options)
    return made, chosen.block_m


class _Short:
    """The kernel for all calls that `Long` isn't for, at one shape."""

    def __init__(self, variant: Variant, programs: int, numbers: tuple[float, ...]) -> None:
        self._variant = variant
        self._programs = programs
        self._numbers = numbers

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        self._variant(self._programs, (q, k, v, out, lse), self._numbers)
