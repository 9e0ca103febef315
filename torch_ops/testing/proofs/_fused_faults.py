"""Planted faults of ops that quantize what another op gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations import catalogue
from torch_ops.declarations._quantization import AMAX_FLOOR, encode
from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import generic_mutants
from torch_ops.testing.proof import Mutant
from torch_ops.testing.proofs._fused_quantization import Fused
from torch_ops.testing.proofs._quantization_faults import (
    amax,
    no_last,
    power_of_two,
    quantizer,
    scale_of,
)

Kernel = Callable[..., Any]


def mutants(fused: Fused, wrong: Kernel, wide: Kernel) -> tuple[Mutant, ...]:
    """Planted faults.

    Args:
        fused: The op.
        wrong: The op before, wrong beyond its bound.
        wide: The op before with a first result that isn't rounded.
    """
    right = catalogue()[fused.before].reference

    def fault(name: str, *kills: str, **pieces: Any) -> Mutant:
        known = tuple(kill for kill in kills if fused.odd or kill != "negated")
        return Mutant(name, known, _composed(fused, right, **pieces))

    plain = _composed(fused, right)
    return (
        Mutant("not_rounded_before", ("composed",), _composed(fused, wide)),
        Mutant("before_is_wrong", ("composed", "bound"), _composed(fused, wrong)),
        *(_of_given(fused, right, fault) if fused.given else _of_scales(fault)),
        fault("sign_ignored", "negated", "bound", codes=lambda v, s, d: encode(v.abs(), s, d)),
        fault("negative_clipped", "negated", "bound",
              codes=lambda v, s, d: encode(v.clamp(min=-1e-2), s, d)),
        *(() if fused.given else (
            fault("largest_without_sign", "negated", "bound",
                  size=lambda g: g.amax(-1, keepdim=True).clamp(min=0) if g.shape[1]
                  else amax(g)),)),
        *generic_mutants(plain),
        *_of_batches(fused, plain),
    )  # fmt: skip


def _composed(fused: Fused, before: Kernel, **pieces: Any) -> Kernel:
    """Two ops as one, of which these pieces of the second are replaced."""
    names, known = fused.arguments, tuple(catalogue()[fused.before].signature.parameters)
    quantize = quantizer(fused.form, **pieces)

    def call(*values: Any) -> Any:
        args = dict(zip(names, values, strict=True))
        made = before(*(args[name] for name in known))
        first, *rest = (made,) if isinstance(made, Tensor) else made
        return (*quantize(first, *fused.more(args)), *rest)

    return call


def _of_scales(fault: Callable[..., Mutant]) -> tuple[Mutant, ...]:
    """Faults of scales that are computed."""
    return (
        fault("limit_too_small", "composed", "bound", "top",
              scale=lambda a, limit: scale_of(a, limit * 0.53)),
        fault("scale_of_all", "composed", "bound", "top",
              size=lambda g: amax(g).amax().expand(g.shape[0], 1) if g.numel() else amax(g)),
        fault("mean_magnitude", "bound", "top",
              size=lambda g: g.abs().mean(-1, keepdim=True) * 2 if g.shape[1] else amax(g)),
        fault("power_of_two", "bound", "composed", scale=power_of_two),
        fault("last_element_dropped", "bound", size=no_last),
        fault("no_floor", "zeros", scale=lambda a, limit: a / limit),
        fault("floor_of_scale", "zeros", scale=lambda a, limit: (a / limit).clamp(min=AMAX_FLOOR)),
        fault("one_for_zeros", "zeros",
              scale=lambda a, limit: torch.where(a > 0, scale_of(a, limit), torch.ones_like(a))),
    )  # fmt: skip


def _of_given(fused: Fused, right: Kernel, fault: Callable[..., Mutant]) -> tuple[Mutant, ...]:
    """Faults of what a given scale does."""
    scaled = _composed(fused, right)
    place = fused.arguments.index("scale")

    def by(change: Callable[[Tensor], Tensor]) -> Kernel:
        return lambda *a: scaled(*a[:place], change(a[place]), *a[place + 1 :])

    def silent(*args: Any) -> Any:
        q, _, *rest = scaled(*args)
        return q, torch.ones(1), *rest

    return (
        Mutant("scale_doubled", ("composed", "zeros", "bound"), by(lambda s: s * 2)),
        Mutant("scale_inverted", ("composed", "zeros", "bound"), by(lambda s: 1 / s)),
        Mutant("scale_is_one", ("zeros", "bound"), silent),
        fault("values_shifted", "zeros", "bound", codes=lambda v, s, d: encode(v + s / 16, s, d)),
        fault("multiplied", "composed", "bound", codes=lambda v, s, d: encode(v * s * s, s, d)),
        fault("largest_with_sign", "negated", "bound",
              codes=lambda v, s, d: encode(torch.where(v < -s, -s, v), s, d)),
    )  # fmt: skip


def _of_batches(fused: Fused, plain: Kernel) -> tuple[Mutant, ...]:
    """Faults of kernels that count rows; the scale that all share is put back behind the codes."""
    places = [fused.arguments.index(name) for name in fused.rows]
    if not fused.given:
        return batch_mutants(plain, places)

    def without(*args: Any) -> Any:
        q, _, *rest = plain(*args)
        return q, *rest

    def again(mutant: Mutant) -> Mutant:
        def call(*args: Any) -> Any:
            q, *rest = mutant.function(*args)
            return q, args[fused.arguments.index("scale")].reshape(1).clone(), *rest

        vars(call).update(vars(mutant.function))
        return Mutant(mutant.name, mutant.kills, call)

    return tuple(map(again, batch_mutants(without, places)))
