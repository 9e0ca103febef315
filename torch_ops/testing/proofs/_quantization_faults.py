"""A plain quantization in pieces, each of which a planted fault replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations._quantization import AMAX_FLOOR, encode, largest
from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import generic_mutants
from torch_ops.testing.proof import Mutant
from torch_ops.testing.proofs._quantization import Form, nearest

Size = Callable[[Tensor], Tensor]
Scale = Callable[[Tensor, float], Tensor]
Codes = Callable[[Tensor, Tensor, torch.dtype], Tensor]


def amax(groups: Tensor) -> Tensor:
    """The largest magnitude of each group."""
    if groups.shape[1] == 0:
        return groups.new_zeros((groups.shape[0], 1))
    return groups.abs().amax(-1, keepdim=True)


def scale_of(size: Tensor, limit: float) -> Tensor:
    """The scale of a largest magnitude."""
    return size.clamp(min=AMAX_FLOOR) / limit


def quantizer(form: Form, size: Size = amax, scale: Scale = scale_of, codes: Codes = encode) -> Any:
    """Returns a quantization made of these pieces."""

    def call(x: Tensor, more: Any = None) -> tuple[Tensor, Tensor]:
        args = {"x": x, "group_size": 128 if more is None else more}
        groups, dtype = form.split(x.float().contiguous(), args), form.dtype(x)
        if form.per == "tensor" and more is not None:
            found = more.reshape(1, 1).clone()
        else:
            found = scale(size(groups), largest(dtype))
        return codes(groups, found, dtype).reshape(x.shape), found.reshape(form.scales(x, args))

    return call


def through(change: Callable[[Tensor, torch.dtype], Tensor]) -> Codes:
    """Codes made of changed quotients; what has no code becomes the largest."""
    return lambda v, s, dtype: encode(change(v / s, dtype), torch.ones_like(s), dtype)


def _half_away(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Ties go away from zero: what is a hair larger isn't one any more."""
    return nearest(v.double() * (1 + 2.0**-40), dtype).float()


def _half_up(v: Tensor, dtype: torch.dtype) -> Tensor:
    return nearest(v.double() + v.double().abs() * 2.0**-40, dtype).float()


def _toward_zero(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a step toward zero before rounding to nearest."""
    near = nearest(v.double(), dtype)
    less = near - near.sign() if dtype == torch.int8 else near * (1 - 1 / 14)
    smaller = nearest(less, dtype)
    return torch.where(near.abs() > v.abs().double(), smaller, near).float()


def _early(v: Tensor, dtype: torch.dtype) -> Tensor:
    limit = largest(dtype)
    return torch.where(v.abs() > limit * 0.58, limit * v.sign(), v)


def _lost_carry(v: Tensor, dtype: torch.dtype) -> Tensor:
    """What is rounded up to a power of two gets half of that: the exponent isn't raised."""
    near = nearest(v.double(), dtype)
    carried = (torch.frexp(near).mantissa.abs() == 0.5) & (near.abs() > v.abs())
    return torch.where(carried, near / 2, near).float()


def _dithered(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Up at even places, down at odd ones."""
    sign = 1.0 - 2.0 * (torch.arange(v.shape[-1]) % 2)
    return v + sign * (v.abs() / 12 if dtype != torch.int8 else torch.full_like(v, 0.45))


def _wrapped(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Beyond 0.9 of the largest code it starts again at the smallest."""
    limit = 0.9 * largest(dtype)
    return torch.where(v.abs() > limit, v - 2 * limit * v.sign(), v)


def _first(size: Tensor) -> Tensor:
    return size[:1].expand(size.shape) if size.numel() else size


def _before(size: Tensor) -> Tensor:
    return size.roll(1, 0)


def _running(size: Tensor) -> Tensor:
    return size.cummax(0).values if size.numel() else size


def _cut(groups: Tensor) -> Tensor:
    size = amax(groups)
    return size[torch.arange(size.shape[0]) % 2] if size.shape[0] > 1 else size


def _some(share: float) -> Size:
    """The largest magnitude of the first part of a group."""
    return lambda g: amax(g[:, : max(int(g.shape[1] * share), 1)])


def no_last(groups: Tensor) -> Tensor:
    """The largest magnitude of all but the last element."""
    return amax(groups[:, :-1]) if groups.shape[1] > 1 else amax(groups)


def power_of_two(size: Tensor, limit: float) -> Tensor:
    """The scale raised to a power of two."""
    scale = scale_of(size, limit)
    return torch.where(scale.isfinite(), torch.exp2(torch.ceil(torch.log2(scale))), scale)


def mutants(form: Form) -> tuple[Mutant, ...]:
    """Faults of a quantization of this form."""

    def fault(name: str, *kills: str, **piece: Any) -> Mutant:
        return Mutant(name, kills, quantizer(form, **piece))

    top = () if form.per == "tensor" else ("top",)
    shared: tuple[Mutant, ...] = (
        fault("limit_too_small", "bound", "idempotent", *top,
              scale=lambda a, limit: scale_of(a, limit * 0.53)),
        fault("limit_too_large", "bound", "idempotent",
              scale=lambda a, limit: scale_of(a, limit * 2)),
        fault("saturates_early", "bound", "idempotent", "ties_to_even", codes=through(_early)),
        fault("ties_away", "ties_to_even", codes=through(_half_away)),
        fault("ties_up", "ties_to_even", "negated", codes=through(_half_up)),
        fault("toward_zero", "bound", "ties_to_even", codes=through(_toward_zero)),
        fault("quotient_in_bfloat16", "bound",
              codes=lambda v, s, d: encode((v.bfloat16() / s.bfloat16()).float(),
                                           torch.ones_like(s), d)),
        fault("carry_lost", "bound", "monotone", codes=through(_lost_carry)),
        fault("dithered", "bound", "monotone", codes=through(_dithered)),
        fault("wraps", "bound", "monotone", codes=through(_wrapped)),
        fault("sign_ignored", "negated", "bound", codes=lambda v, s, d: encode(v.abs(), s, d)),
        fault("negative_clipped", "negated", "bound",
              codes=lambda v, s, d: encode(v.clamp(min=-1e-2), s, d)),
        fault("values_clipped", "scaled", "bound",
              codes=lambda v, s, d: encode(v.clamp(-2, 2), s, d)),
        fault("values_in_steps", "scaled", "bound",
              codes=lambda v, s, d: encode((v * 64).round() / 64, s, d)),
        fault("values_shifted", "scaled", "zeros", "negated", "bound",
              codes=lambda v, s, d: encode(v + 0.01, s, d)),
        fault("tiny_lifted", "zeros", "negated",
              codes=lambda v, s, d: encode(torch.where(v.abs() < s, s, v), s, d)),
        fault("zeros_are_nan", "zeros", "bound",
              codes=lambda v, s, d: encode(v, torch.where(s <= 1e-12, torch.nan, s), d)
              if d != torch.int8 else encode(torch.where(v == 0, s, v), s, d)),
        fault("nan_spreads", "isolated",
              codes=lambda v, s, d: encode(v + 0 * v.sum(), s, d)
              if d != torch.int8 else encode(torch.where(v.sum().isfinite(), v, 0.0), s, d)),
        fault("nan_turns_all_to_zero", "isolated",
              codes=lambda v, s, d: encode(v * v.isfinite().all(), s, d)),
        fault("infinity_empties", "isolated",
              codes=lambda v, s, d: encode(torch.where(v.isfinite().all(), v, torch.zeros_like(v)),
                                           s, d)),
        fault("last_row_unscaled", "row_permutation", "bound", codes=_last_unscaled),
        fault("first_two_swapped", "row_permutation", "bound", codes=_first_swapped),
        fault("last_is_the_first", "row_permutation", "bound", codes=_last_is_first),
    )  # fmt: skip
    plain = quantizer(form)
    rows = () if form.per == "tensor" else (*_of_groups(form), *batch_mutants(plain, (0,)))
    return (*shared, *_of_scales(form), *rows, *generic_mutants(plain))


def _last_unscaled(v: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """The last element of all isn't divided."""
    v = v.clone()
    if v.numel():
        v[-1, -1] *= s.reshape(-1)[-1]
    return encode(v, s, dtype)


def _first_swapped(v: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """The first two elements of all swap places."""
    flat = v.clone().reshape(-1)
    if flat.numel() > 1:
        flat[:2] = flat[:2].flip(0)
    return encode(flat.reshape(v.shape), s, dtype)


def _last_is_first(v: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """The last element of all is the first one."""
    v = v.clone()
    if v.numel():
        v[-1, -1] = v[0, 0]
    return encode(v, s, dtype)


def _of_scales(form: Form) -> tuple[Mutant, ...]:
    """Faults of scales that are computed."""

    def fault(name: str, *kills: str, **piece: Any) -> Mutant:
        return Mutant(name, kills, quantizer(form, **piece))

    return (
        fault("no_floor", "zeros", scale=lambda a, limit: a / limit),
        fault("floor_of_scale", "zeros", scale=lambda a, limit: (a / limit).clamp(min=AMAX_FLOOR)),
        fault("one_for_zeros", "zeros",
              scale=lambda a, limit: torch.where(a > 0, scale_of(a, limit), torch.ones_like(a))),
        fault("floor_added", "scaled", "bound", scale=lambda a, limit: scale_of(a + 1e-3, limit)),
        fault("constant_scale", "scaled", "bound",
              scale=lambda a, limit: torch.full_like(a, 0.01)),
        fault("scale_clipped", "scaled", "bound",
              scale=lambda a, limit: scale_of(a, limit).clamp(min=1e-2)),
        fault("scale_in_float16", "bound",
              scale=lambda a, limit: scale_of(a, limit).half().float().clamp(min=1e-7)),
        fault("power_of_two", "bound", scale=power_of_two),
        fault("largest_without_sign", "negated", "bound",
              size=lambda g: g.amax(-1, keepdim=True).clamp(min=0) if g.shape[1] else amax(g)),
        fault("half_of_the_group", "bound", size=_some(0.5)),
    )  # fmt: skip


def _of_groups(form: Form) -> tuple[Mutant, ...]:
    """Faults of what shares a scale."""

    def fault(name: str, *kills: str, **piece: Any) -> Mutant:
        return Mutant(name, kills, quantizer(form, **piece))

    return (
        fault("scale_of_the_first", "bound", "isolated", size=lambda g: _first(amax(g))),
        fault("scale_of_the_one_before", "bound", "isolated", size=lambda g: _before(amax(g))),
        fault("running_scale", "bound", "isolated", size=lambda g: _running(amax(g))),
        fault("group_index_cut", "bound", size=_cut),
        fault("last_element_dropped", "bound", size=no_last),
        fault("scale_of_all", "bound", "top", "isolated",
              size=lambda g: amax(g).amax().expand(g.shape[0], 1) if g.numel() else amax(g)),
        fault("mean_magnitude", "bound", "top",
              size=lambda g: g.abs().mean(-1, keepdim=True) * 2 if g.shape[1] else amax(g)),
    )  # fmt: skip
