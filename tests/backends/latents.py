"""What is interpreted and compiled of Triton's attention to latents, beside `ragged_*`."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .rows_compiled import BACKEND, Launch, recorded

OP = "mla_decode"
# Sequences of many pieces, more of them than are looked through at once, and a program's heads
# that are no whole tile.
SIZES: dict[str, dict[str, Any]] = {
    "pieces": {"keys": [100, 20, 0, 9], "heads": 17, "page_size": 4},
    "laws": {"keys": [40, 0, 9], "heads": 3, "page_size": 4},
    "pages of one": {"keys": [70, 3], "heads": 3, "page_size": 1},
    "large pages": {"keys": [60, 129], "heads": 2, "page_size": 128},
    "many sequences": {"keys": [3, 2, 0] * 4, "heads": 1, "page_size": 4},
}
LAYOUTS = ("row_stride", "transposed")
INTERPRETED = (
    f"{OP} float16: laws", f"{OP} float32: pieces", f"{OP} float16: pages of one",
    f"{OP} float16: large pages", f"{OP} float32: many sequences", f"{OP} float16: layouts",
    f"{OP} float32: zero",
)  # fmt: skip
# Target, dtype, heads, page_size, elements of a latent and of its rotated part.
COMPILED = (
    f"sm_80 {OP} bfloat16 128 64 512 64", f"sm_90 {OP} bfloat16 128 64 512 64",
    f"sm_90 {OP} float16 16 1 512 64", f"sm_100 {OP} bfloat16 128 16 512 64",
    f"gfx942 {OP} bfloat16 128 64 512 64", f"gfx950 {OP} float32 16 16 512 64",
    f"sm_90 {OP} bfloat16 40 5 24 3",
)  # fmt: skip


def specs(dtype: str, part: str) -> list[Any]:
    """Give the Specs of a check."""
    from torch_ops.testing import draw
    from torch_ops.testing.proofs._latents import DIMS, FORM
    from torch_ops.testing.proofs._ragged import sized, spec_of
    from torch_ops.testing.spec import Operand

    def spec(dims: dict[str, int], layout: str = "contig") -> Any:
        looks = {n: Operand(dtype, layout) for n in (*FORM.queries, FORM.keys, FORM.values)}
        made = spec_of(OP, FORM, dims, looks, {"scale": -0.125}, seed=3)
        return draw.fitted(made, FORM.shapes(made))

    def of(name: str) -> dict[str, int]:
        others = {n: size for n, size in SIZES[name].items() if n != "keys"}
        return sized([], SIZES[name]["keys"], latent=16, rope=8, pad=2, spare=1, **others)

    return [spec(of(part))] if part in SIZES else [spec(DIMS["ends"], name) for name in LAYOUTS]


def judge(check: str, name: str, made: Any) -> None:
    """Refuse a kernel of Hopper's that keeps a tile twice, or fewer than three of them.

    Keys are multiplied by 8 warps of two groups side by side: those that lead to another product
    are otherwise given to one group each, of rows that aren't there.
    """
    if check != f"sm_90 {OP} bfloat16 128 64 512 64" or name != "decode_latents":
        return
    text, rows = made.asm["ttgir"], 2 * (512 + 64)
    most = (64 + 3 * 32) * rows + 2 * 64 * 32
    if "3x32x512xbf16" not in text or made.metadata.shared > most:
        raise AssertionError(f"{check}: {made.metadata.shared} bytes, {most} for three tiles")
    products = [line for line in text.splitlines() if line.startswith("#mma")]
    if not products or any("warpsPerCTA = [4, 2]" not in line for line in products):
        raise AssertionError(f"{check}: {products}")


def launches(check: str) -> list[Launch]:
    """Give what a call launches; tiles are chosen as on the target of `ragged_compiled`."""
    _, _, dtype, *numbers = check.split()
    heads, page, latent, rope = map(int, numbers)
    kind = getattr(torch, dtype)
    q = [torch.zeros(3, heads, width, dtype=kind) for width in (latent, rope)]
    caches = [torch.zeros(9, page, width, dtype=kind) for width in (latent, rope)]
    bounds = torch.zeros(4, dtype=torch.int32)
    with recorded() as found:
        function = importlib.import_module(f"{BACKEND}.{OP}").mla_decode
        function(*q, *caches, bounds, torch.zeros(2000).int(), bounds[1:], 0.25)
    assert [launch.name for launch in found] == ["decode_latents", "unite"]
    return found
