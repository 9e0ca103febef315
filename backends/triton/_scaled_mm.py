"""Products of quantized matrices in Triton: what is served, tile sizes, and the launch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops.declarations._scaled_mm import BLOCK, forms

from ._attention import arch_of
from ._launch import INTERPRETED, WARP, Launch, remember
from ._scaled_mm_hopper import Large, fits
from ._scaled_mm_kernel import multiply as kernel

__all__ = ["Config", "config", "multiply", "refusal"]

_BYTES = 16


class Config(NamedTuple):
    """Tile sizes.

    Attributes:
        block_m, block_n: Rows and columns of a program.
        block_k: Products of a step.
        warps: Warps of a program.
        stages: Steps whose parts of the matrices are in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


@functools.cache
def refusal(dtype: torch.dtype, device: int) -> str | None:
    """Give why matrices of a float8 dtype can't be multiplied on a GPU, or None."""
    if INTERPRETED:
        return f"{dtype} is untestable in Triton's interpreter (supported there: torch.int8)"
    arch = arch_of(device)
    known = () if arch is None else _float8(arch)
    if dtype in known:
        return None
    accepted = ", ".join(map(str, known)) or "none before sm_89"
    return f"a dtype {dtype} on {arch} (supported: {accepted})"


def _float8(arch: str) -> tuple[torch.dtype, ...]:
    if arch.startswith("gfx94"):
        return (torch.float8_e4m3fnuz,)
    if arch.startswith("sm_") and int(arch.removeprefix("sm_")) < 89:
        return ()
    return (torch.float8_e4m3fn,)


def config(arch: str | None, m: int, lane: int, *, grouped: bool, exact: bool) -> Config:
    """Choose by the number of rows.

    Measured on an H200 for 4096 x 4096 x 4096: int8 134 us with tiles of 128 x 256, 161 of
    128 x 128; float8, whose promoted sums need as many registers again, 151 of 256 x 128, 162 and
    380, and 106 in Gluon, see `_scaled_mm_hopper`. For 16 x 6144 x 4096 16 us, for 64 x 4096 x 4096
    13, for 512 x 7168 x 2048 25.

    Where elements are loaded one by one, tiles are too small for tensor cores that work on their
    own: see `_attention.config`.

    Args:
        arch: ``"sm_90"``, ``"gfx942"``, None for the interpreter.
        m: Rows.
        lane: Elements that are loaded at once.
        grouped: Whether each step along K has scales of its own.
        exact: Whether sums are whole numbers.
    """
    if arch is None:
        return Config(64, 64, 128, 4, 1)
    if lane == 1:
        return Config(32, 32, BLOCK, 4, 1)
    if arch.startswith("gfx"):
        return Config(128 if m > 64 else 32, 128, 128, 4, 1)
    if m <= 16:
        return Config(16, 32, 256, 4, 4)
    if m <= 64:
        return Config(64, 32, 256, 4, 4)
    if m <= 512:
        return Config(64, 128, 128, 4, 4)
    if grouped or arch not in ("sm_90", "sm_100", "sm_103"):
        return Config(128, 128, 128, 8, 3)
    return Config(128, 256, 128, 8, 3) if exact else Config(256, 128, 128, 8, 3)


_launches: dict[Any, Launch | Large] = {}


def multiply(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """Multiply, scale and add in one launch."""
    y = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if not y.numel():
        return y
    if not a.shape[1]:
        return y.zero_() if bias is None else y.copy_(bias)
    a, b = _dense(a, b)
    key = (
        a.dtype, a.shape, a.stride(), b.shape[1], b.stride(), scale_a.shape, scale_a.stride(),
        scale_b.shape, scale_b.stride(), out_dtype,
        None if bias is None else (bias.dtype, bias.stride()), a.get_device(),
        (a.data_ptr() | b.data_ptr()) % _BYTES == 0,
    )  # fmt: skip
    made = _launches.get(key)
    if made is None:
        made = _find(a, b, scale_a, scale_b, bias, y, aligned=key[-1])
        remember(_launches, key, made)
    if isinstance(made, Large):
        made(a, b, y, scale_a, scale_b, bias)
    else:
        made.variant(made.programs, (a, b, scale_a, scale_b, bias, y), made.numbers)
    return y


def _dense(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Give matrices that are loaded as vectors where K lets them be.

    Others would be multiplied by other instructions, which sum float8 to other bits.
    """
    if a.shape[1] % _BYTES:
        return a, b
    columns = b.t()
    if not _vectors(a):
        a = a.clone(memory_format=torch.contiguous_format)
    if not _vectors(columns):
        columns = columns.clone(memory_format=torch.contiguous_format)
    return a, columns.t()


def _vectors(x: Tensor) -> bool:
    """Whether the rows of a matrix can be loaded 16 bytes at once."""
    return x.stride(1) == 1 and not (x.stride(0) | x.data_ptr()) % _BYTES


def _find(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, y: Tensor,
    *, aligned: bool,
) -> Launch | Large:  # fmt: skip
    """Choose a kernel for matrices of these shapes and strides."""
    (m, k), n = a.shape, b.shape[1]
    left, right, grouped, blocked = forms(b, scale_a, scale_b)
    packed = a.stride(1) == 1, b.stride(0) == 1
    vectors = aligned and all(packed) and not (k | a.stride(0) | b.stride(1)) % _BYTES
    if vectors and not grouped and fits(a, b):
        return Large(a, b, y, scale_a, scale_b, bias)
    lane = _BYTES if vectors else 1
    exact = a.dtype == torch.int8
    chosen = config(arch_of(a.get_device()), m, lane, grouped=grouped, exact=exact)
    if grouped:
        chosen = chosen._replace(block_k=BLOCK)
    out_lane = 8 if n % 8 == 0 else 1
    constants = (
        lane, out_lane, *packed, k % chosen.block_k == 0, grouped, BLOCK if blocked else 1,
        exact, chosen.block_m, chosen.block_n, chosen.block_k,
    )  # fmt: skip
    steps = (*_steps(left), *_steps(right), 0 if bias is None else bias.stride(0))
    numbers = (
        m, n // out_lane, k // lane, a.stride(0) // lane, a.stride(1), b.stride(0),
        b.stride(1) // lane, *steps,
    )  # fmt: skip
    variant = kernel.variant(
        constants, chosen.warps * WARP, a.get_device(), aligned=vectors,
        options={"num_stages": chosen.stages},
    )  # fmt: skip
    programs = -(-m // chosen.block_m) * -(-n // chosen.block_n)
    return Launch(variant, programs, numbers, lane)


def _steps(scale: Tensor) -> list[int]:
    """Give what to step by in a matrix of scales: nothing along an axis that shares one."""
    return [s if size > 1 else 0 for size, s in zip(scale.shape, scale.stride(), strict=True)]
