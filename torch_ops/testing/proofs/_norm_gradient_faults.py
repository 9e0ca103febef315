"""Plain gradients of norms in pieces, each of which a planted fault replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import compute_dtype
from torch_ops.testing.faults import floored, generic_mutants, raised, truncated
from torch_ops.testing.laws import flip_rows
from torch_ops.testing.proof import Mutant
from torch_ops.testing.proofs import _norm_faults as fault
from torch_ops.testing.proofs._norm_gradients import Form

RMS = Form("rms_norm_backward", center=False)
LAYER = Form("layer_norm_backward", center=True)
Change = Callable[[Tensor], Tensor]


def _same(value: Tensor) -> Tensor:
    return value


def _mean(value: Tensor) -> Tensor:
    return value.mean(-1, keepdim=True)


def _total(terms: Tensor) -> Tensor:
    return terms.unsqueeze(0).sum(list(range(terms.dim())))


def _gain(weight: Tensor, one_plus: bool, dtype: torch.dtype) -> Tensor:
    return fault.one_plus(weight, dtype) if one_plus else fault.plain(weight, dtype)


class Pieces:
    """Gradients of a norm, made of these pieces."""

    square: fault.Mean = staticmethod(fault.mean_square)
    root: fault.Root = staticmethod(fault.inverse_root)
    finish: fault.Finish = staticmethod(fault.nearest)
    gain: Callable[[Tensor, bool, torch.dtype], Tensor] = staticmethod(_gain)
    upstream: Change = staticmethod(_same)
    normal: Change = staticmethod(_same)
    slope: Callable[[Tensor, Tensor], Tensor] = staticmethod(lambda g, x: _mean(g * x))
    level: Change = staticmethod(_mean)
    """Of layer norm: the mean of a row, of x and of gradients."""
    total: Change = staticmethod(_total)
    terms: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(lambda d, g, x: d * x)
    shift: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(lambda d, g, x: d)
    added: Callable[[Tensor, Tensor], Tensor] = staticmethod(torch.add)

    def __init__(self, **changes: Any) -> None:
        vars(self).update(changes)

    def dx_and_terms(
        self, x: Tensor, grad: Tensor, weight: Tensor | None, eps: float, flags: tuple[bool, bool]
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """dx before it is rounded; grad, g and x_hat of each row."""
        center, one_plus = flags
        compute = compute_dtype(x.dtype)
        exact, d = x.to(compute).contiguous(), self.upstream(grad.to(compute).contiguous())
        if center:
            exact = exact - self.level(exact)
        r = self.root(self.square(exact), eps)
        x_hat = self.normal(exact * r)
        g = d if weight is None else d * self.gain(weight, one_plus, compute)
        inner = g - x_hat * self.slope(g, x_hat)
        return r * (inner - self.level(g) if center else inner), (d, g, x_hat)

    def vector(self, total: Tensor, vector: Tensor | None, like: Tensor) -> Tensor:
        """A sum over rows in its dtype."""
        return like.new_empty(0) if vector is None else self.finish(total, vector.dtype)

    def rms(
        self, x: Tensor, grad: Tensor, weight: Tensor | None = None, residual: Tensor | None = None,
        eps: float = 1e-6, one_plus: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of an rms norm."""
        dx, terms = self.dx_and_terms(x, grad, weight, eps, (False, one_plus))
        if residual is not None:
            dx = self.added(dx, residual.to(dx.dtype))
        dw = self.vector(self.total(self.terms(*terms)), weight, x)
        return self.finish(dx, x.dtype).contiguous(), dw

    def layer(
        self, x: Tensor, grad: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of a layer norm."""
        dx, terms = self.dx_and_terms(x, grad, weight, eps, (True, False))
        dw = self.vector(self.total(self.terms(*terms)), weight, x)
        db = self.vector(self.total(self.shift(*terms)), bias, x)
        return self.finish(dx, x.dtype).contiguous(), dw, db


def _with_unit(form: Form, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A kernel that takes another weight for an absent one."""
    right = _function(form)

    def kernel(x: Tensor, grad: Tensor, weight: Tensor | None = None, *rest: Any) -> Any:
        if weight is not None or not x.numel():
            return right(x, grad, weight, *rest)
        one = torch.zeros if not form.center and rest[-1] else torch.ones
        found = right(x, grad, change(one(x.shape[-1], dtype=x.dtype)), *rest)
        return found[0], x.new_empty(0), *found[2:]

    return kernel


def _function(form: Form, **changes: Any) -> Callable[..., Any]:
    pieces = Pieces(**changes)
    return pieces.layer if form.center else pieces.rms


def _other_rows(terms: Tensor) -> Tensor:
    return flip_rows(terms) if terms.dim() > 1 else terms


def _without_last_row(terms: Tensor) -> Tensor:
    return _total(terms[:-1]) if terms.dim() > 1 else _total(terms)


def _weighted_rows(terms: Tensor) -> Tensor:
    """Later rows count less."""
    if terms.dim() < 2:
        return terms
    fading = 1 / (1 + torch.arange(terms.shape[0], dtype=terms.dtype))
    return _total(terms * fading.view(-1, *[1] * (terms.dim() - 1)))


def _in_bfloat16(terms: Tensor) -> Tensor:
    return _total(terms.bfloat16()).to(terms.dtype)


def _common(form: Form) -> tuple[Mutant, ...]:
    """Faults of both."""

    def made(**changes: Any) -> Callable[..., Any]:
        return _function(form, **changes)

    square = fault.mean_square
    return (
        Mutant("eps_fixed", ("scale_with_eps", "bound"),
               made(root=fault.with_eps(lambda _: 1e-5))),
        Mutant("eps_outside_root", ("scale_with_eps", "bound"), made(root=fault.eps_outside)),
        Mutant("squares_in_float16", ("scale_with_eps", "bound"),
               made(square=fault.in_half_precision)),
        Mutant("last_element_dropped", ("bound",), made(square=fault.without_last)),
        Mutant("slope_left_out", ("bound",), made(slope=lambda g, x: torch.zeros_like(_mean(x)))),
        Mutant("slope_of_half", ("bound",),
               made(slope=lambda g, x: _mean((g * x)[..., : (x.shape[-1] + 1) // 2]))),
        Mutant("slope_in_bfloat16", ("bound",),
               made(slope=lambda g, x: _mean(g * x).bfloat16().to(g.dtype))),
        Mutant("truncated", ("rounding_bias", "bound"), made(finish=truncated)),
        Mutant("rounded_down", ("rounding_bias", "negated_grad", "odd", "bound"),
               made(finish=floored)),
        Mutant("rounded_up", ("rounding_bias", "negated_grad", "odd", "bound"),
               made(finish=raised)),
        Mutant("absolute_grad", ("negated_grad", "bound"), made(upstream=torch.abs)),
        Mutant("absolute_x", ("odd", "bound"), made(normal=torch.abs)),
        Mutant("grad_plus_tiny", ("zero_grad", "bound"), made(upstream=lambda d: d + 2.0**-10)),
        Mutant("grad_left_out", ("zero_grad", "scaled_grad", "bound"),
               made(upstream=torch.ones_like)),
        Mutant("grad_clipped", ("scaled_grad", "bound"), made(upstream=lambda d: d.clamp(-2, 2))),
        Mutant("grad_in_float16", ("scaled_grad", "bound"),
               made(upstream=lambda d: (d * 1e4).half().to(d.dtype) / 1e4)),
        Mutant("sums_plus_tiny", ("zero_grad", "bound"), made(total=lambda t: _total(t) + 1e-4)),
        Mutant("weight_left_out", ("zero_gain", "weight_scale", "bound"),
               made(gain=lambda w, one, d: torch.ones_like(w, dtype=d))),
        Mutant("weight_plus_tiny", ("zero_gain", "weight_scale", "bound"),
               made(gain=lambda w, one, d: _gain(w, one, d) + 2.0**-6)),
        Mutant("weight_clipped", ("weight_scale", "bound"),
               made(gain=lambda w, one, d: _gain(w, one, d).clamp(-2, 2))),
        Mutant("sum_of_weighted", ("zero_gain", "weight_scale", "bound"),
               made(terms=lambda d, g, x: g * x)),
        Mutant("absent_weight_is_two", ("absent_weight", "bound"),
               _with_unit(form, lambda one: one + 1)),
        Mutant("absent_weight_is_below_one", ("absent_weight", "bound"),
               _with_unit(form, lambda one: one - 2.0**-7)),
        Mutant("absent_weight_is_above_one", ("absent_weight", "bound"),
               _with_unit(form, lambda one: one + 2.0**-6)),
        Mutant("row_0_for_all", ("row_permutation", "bound"),
               made(square=fault.after(square, fault.first_row))),
        Mutant("row_before", ("row_permutation", "bound"),
               made(square=fault.after(square, fault.previous_row))),
        Mutant("row_index_cut", ("row_permutation", "bound"),
               made(square=fault.after(square, fault.repeated_rows(4)))),
        Mutant("last_row_not_added", ("row_permutation", "bound"), made(total=_without_last_row)),
        Mutant("later_rows_fade", ("row_permutation", "bound"), made(total=_weighted_rows)),
        Mutant("sums_in_bfloat16", ("bound",), made(total=_in_bfloat16)),
        Mutant("mean_of_rows", ("bound",),
               made(total=lambda t: _total(t) * t.shape[-1] / max(t.numel(), 1))),
        Mutant("terms_of_other_rows", ("bound",),
               made(terms=lambda d, g, x: d * _other_rows(x))),
    )  # fmt: skip


def _of_residuals() -> tuple[Mutant, ...]:
    def added(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
        return _function(RMS, added=change)

    return (
        Mutant("residual_left_out", ("zero_grad", "zero_gain", "bound"), added(lambda y, e: y)),
        Mutant("residual_scaled", ("zero_grad", "zero_gain", "bound"),
               added(lambda y, e: y + e * (1 + 2.0**-6))),
        Mutant("residual_of_other_row", ("zero_grad", "zero_gain", "bound"),
               added(lambda y, e: y + _other_rows(e))),
        Mutant("one_is_not_added", ("zero_gain", "bound"),
               _function(RMS, gain=lambda w, one, d: _gain(w, False, d))),
    )  # fmt: skip


def _of_means() -> tuple[Mutant, ...]:
    def made(**changes: Any) -> Callable[..., Any]:
        return _function(LAYER, **changes)

    return (
        Mutant("means_left_out", ("bound",), made(level=lambda t: torch.zeros_like(t[..., :1]))),
        Mutant("means_in_bfloat16", ("bound",), made(level=lambda t: _mean(t).bfloat16().to(t))),
        Mutant("shift_weighted", ("one_row", "zero_gain", "bound"), made(shift=lambda d, g, x: g)),
        Mutant("shift_is_scale", ("one_row", "odd", "bound"), made(shift=lambda d, g, x: d * x)),
        Mutant("shift_centered", ("one_row", "bound"),
               made(shift=lambda d, g, x: d - _mean(d))),
    )  # fmt: skip


def mutants(form: Form) -> tuple[Mutant, ...]:
    """Planted faults of an op."""
    own = _of_means() if form.center else _of_residuals()
    return (*_common(form), *own, *generic_mutants(_function(form)))
