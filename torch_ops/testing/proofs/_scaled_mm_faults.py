"""A plain product of quantized matrices in pieces, and planted faults that replace them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations._scaled_mm import BLOCK, product
from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import floored, generic_mutants, raised, truncated
from torch_ops.testing.proof import Mutant

Kernel = Callable[..., Any]
_NONE: Any = None


def mutants(wide: torch.dtype, *, exact: bool) -> tuple[Mutant, ...]:
    """Planted faults of a product whose sums are of a dtype, and exact or not."""
    bias = ("rounding_bias",) if exact else ()

    def right(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return product((a, b, scale_a, scale_b), out_dtype, bias, wide)

    def with_(**changes: Callable[[Tensor], Tensor]) -> Kernel:
        """The right product of changed arguments."""

        def call(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: torch.dtype,
                 bias: Tensor | None = None) -> Tensor:  # fmt: skip
            args: dict[str, Any] = {"a": a, "b": b, "scale_a": sa, "scale_b": sb, "bias": bias}
            for name, change in changes.items():
                if args[name] is not None:
                    args[name] = change(args[name])
            return right(args["a"], args["b"], args["scale_a"], args["scale_b"], out, args["bias"])

        return call

    def finish(change: Callable[[Tensor, torch.dtype], Tensor]) -> Kernel:
        """The right product in float32, rounded otherwise."""
        return lambda a, b, sa, sb, out, bias=None: change(
            right(a, b, sa, sb, torch.float32, bias), out
        )

    def sums_in(dtype: torch.dtype) -> Kernel:
        """Products summed in a narrow dtype."""
        return lambda a, b, sa, sb, out, bias=None: product(
            (a.to(dtype), b.to(dtype), sa, sb), out, bias, dtype
        )

    return (
        Mutant("last_column_dropped", ("exact", "bound"), with_(
            a=lambda a: torch.cat([a[:, :-1], torch.zeros_like(a[:, :1])], 1))),
        Mutant("whole_tiles_alone", ("exact", "bound"), with_(a=_whole_tiles)),
        Mutant("sums_in_bfloat16", ("exact", "bound"), sums_in(torch.bfloat16)),
        Mutant("rows_of_a_rotated", ("exact", "bound"), with_(a=lambda a: a.roll(1, 0))),
        Mutant("scale_a_ignored", ("powers", "odd", "nothing", "bound"),
               with_(scale_a=torch.ones_like)),
        Mutant("scale_b_ignored", ("powers", "odd", "nothing", "bound"),
               with_(scale_b=torch.ones_like)),
        Mutant("scale_squared", ("powers", "odd", "bound"), with_(scale_a=torch.square)),
        Mutant("scale_clipped", ("powers", "bound"), with_(scale_b=lambda s: s.clamp(-2, 2))),
        Mutant("scale_in_bfloat16", ("bound",), with_(scale_a=lambda s: s.bfloat16().float())),
        Mutant("absolute_scale", ("odd", "bound"), with_(scale_a=torch.abs)),
        Mutant("scale_never_zero", ("nothing",), with_(
            scale_a=lambda s: torch.where(s.abs() < 1e-3, 1e-3, s))),
        Mutant("scale_of_row_0", ("row_permutation", "bound"), with_(
            scale_a=lambda s: s[:1].expand(s.shape) if s.dim() == 2 else s)),
        Mutant("scale_of_row_before", ("row_permutation", "bound"), with_(
            scale_a=lambda s: s.roll(1, 0) if s.dim() == 2 else s)),
        Mutant("scale_of_row_cut", ("row_permutation", "bound"), with_(
            scale_a=lambda s: s[torch.arange(s.shape[0]) % 4] if s.dim() == 2 else s)),
        Mutant("scale_of_column_0", ("column_permutation", "bound"), with_(
            scale_b=lambda s: s[:, :1].expand(s.shape) if s.dim() == 2 else s)),
        Mutant("scale_of_column_before", ("column_permutation", "bound"), with_(
            scale_b=lambda s: s.roll(1, 1) if s.dim() == 2 else s)),
        Mutant("bias_of_column_before", ("column_permutation", "bound"), with_(
            bias=lambda c: c.roll(1, 0))),
        Mutant("scale_of_group_before", ("bound",), with_(
            scale_a=lambda s: s.roll(1, 1) if s.dim() == 2 else s)),
        Mutant("scale_of_first_group", ("bound",), with_(
            scale_b=lambda s: s[:1].expand(s.shape) if s.dim() == 2 else s)),
        Mutant("bias_ignored", ("nothing", "bound"),
               lambda a, b, sa, sb, out, bias=None: right(a, b, sa, sb, out, _NONE)),
        Mutant("bias_scaled", ("nothing", "bound"), lambda a, b, sa, sb, out, bias=None: right(
            a, b, sa, sb, out, None if bias is None else bias.float() * sa.float().mean())),
        Mutant("bias_adds_to_nothing", ("no_bias", "bound"), with_(bias=lambda c: c + 0.0625)),
        Mutant("none_is_one", ("no_bias", "bound"), lambda a, b, sa, sb, out, bias=None: right(
            a, b, sa, sb, out, torch.ones(b.shape[1]) if bias is None else bias)),
        Mutant("none_rounds_down", ("no_bias", "bound"),
               lambda a, b, sa, sb, out, bias=None: (
                   finish(floored) if bias is None else right)(a, b, sa, sb, out, bias)),
        Mutant("rounded_before_bias", ("bound",), lambda a, b, sa, sb, out, bias=None: (
            right(a, b, sa, sb, torch.bfloat16).float() + (0 if bias is None else bias)).to(out)),
        Mutant("truncated", (*bias, "bound"), finish(truncated)),
        Mutant("rounded_down", (*bias, "odd", "bound"), finish(floored)),
        Mutant("rounded_up", (*bias, "odd", "bound"), finish(raised)),
        *generic_mutants(right),
        *(dataclasses.replace(m, function=_scaled_by_row(m.function))
          for m in batch_mutants(right, (0, 2))),
    )  # fmt: skip


def _scaled_by_row(kernel: Kernel) -> Kernel:
    """The kernel with a scale for each row, so that rows can be taken apart."""

    def each(a: Tensor, b: Tensor, scale_a: Tensor, *rest: Any) -> tuple[Any, ...]:
        scale = scale_a.reshape(1, 1).expand(a.shape[0], 1) if scale_a.numel() == 1 else scale_a
        return a, b, scale, *rest

    def call(*args: Any) -> Any:
        return kernel(*each(*args))

    supports = getattr(kernel, "supports", None)
    if supports is not None:
        call.supports = lambda *args: supports(*each(*args))  # type: ignore[attr-defined]
    return call


def _whole_tiles(a: Tensor) -> Tensor:
    """Zero what is behind the last whole tile, unless it is all there is."""
    kept = a.clone()
    whole = a.shape[1] // BLOCK * BLOCK
    if whole:
        kept[:, whole:] = 0
    return kept
