"""A plain gated activation in pieces, each of which a planted fault replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torch_ops.testing.arithmetic import compute_dtype
from torch_ops.testing.batch_faults import batch_mutants
from torch_ops.testing.faults import floored, generic_mutants, raised, truncated
from torch_ops.testing.proof import Mutant

Activation = Callable[[Tensor], Tensor]


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and value."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def gate(
    act: Activation,
    product: Callable[[Tensor, Tensor], Tensor] = torch.mul,
    finish: Callable[[Tensor, torch.dtype], Tensor] = lambda y, dtype: y.to(dtype),
    halves: Callable[[Tensor], tuple[Tensor, Tensor]] = split,
) -> Callable[[Tensor], Tensor]:
    """Returns a gated activation made of these pieces."""

    def kernel(x: Tensor) -> Tensor:
        g, v = halves(x.to(compute_dtype(x.dtype)).contiguous())
        return finish(product(act(g), v), x.dtype)

    return kernel


def _interleaved(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2].contiguous(), x[..., 1::2].contiguous()


def _unmultiplied_tail(a: Tensor, v: Tensor) -> Tensor:
    """The last elements past a multiple of 16 miss the product."""
    y = a * v
    y[..., v.shape[-1] // 16 * 16 :] = a[..., v.shape[-1] // 16 * 16 :]
    return y


def _first_row_of(act: Activation) -> Activation:
    return lambda g: act(g.reshape(-1, g.shape[-1])[:1].expand(g.numel() // max(g.shape[-1], 1), -1)
                         .reshape(g.shape)) if g.numel() else act(g)  # fmt: skip


def _row_before(g: Tensor) -> Tensor:
    return g.roll(1, 0) if g.dim() > 1 else g


def _tail_rows(a: Tensor, v: Tensor) -> Tensor:
    y = a * v
    return torch.cat([y[:1], y[:-1]]) if y.dim() > 1 and len(y) else y


def mutants(act: Activation, others: Mapping[str, Activation]) -> tuple[Mutant, ...]:
    """Faults of a gate with this activation; `others` are activations it is taken for."""
    plain = gate(act)
    swapped = tuple(Mutant(f"is_{name}", ("bound",), gate(f)) for name, f in others.items())
    return (
        *swapped,
        Mutant("truncated", ("rounding_bias", "bound",), gate(act, finish=truncated)),
        Mutant("activation_rounded_first", ("bound",),
               lambda x: gate(lambda g: act(g).to(x.dtype).to(g.dtype))(x)),
        Mutant("interleaved_halves", ("bound",), gate(act, halves=_interleaved)),
        Mutant("value_first", ("bound", "open_gate"), gate(act, halves=lambda x: split(x)[::-1])),
        Mutant("sum_instead_of_product", ("zero_value", "zero_gate", "bound"),
               gate(act, torch.add)),
        Mutant("tail_not_multiplied", ("zero_value", "negated_value", "scaled_value", "bound"),
               gate(act, _unmultiplied_tail)),
        Mutant("value_plus_one", ("zero_value", "bound"), gate(act, lambda a, v: a * (v + 1))),
        Mutant("gate_shifted", ("zero_gate", "bound"), gate(lambda g: act(g + 0.125))),
        Mutant("gate_floor", ("zero_gate", "bound"), gate(lambda g: act(g).clamp(min=1e-3))),
        Mutant("gate_not_multiplied", ("zero_gate", "bound"), gate(torch.sigmoid)),
        Mutant("rounded_down", ("rounding_bias", "negated_value", "bound"),
               gate(act, finish=floored)),
        Mutant("rounded_up", ("rounding_bias", "negated_value", "bound"),
               gate(act, finish=raised)),
        Mutant("absolute_value", ("negated_value", "bound"), gate(act, lambda a, v: a * v.abs())),
        Mutant("value_clipped", ("scaled_value", "bound"),
               gate(act, lambda a, v: a * v.clamp(-2, 2))),
        Mutant("value_in_float16", ("scaled_value", "bound"),
               gate(act, lambda a, v: a * (v * 1e4).half().to(v.dtype) / 1e4)),
        Mutant("gate_clipped", ("open_gate", "bound"), gate(lambda g: act(g.clamp(max=7)))),
        Mutant("exp_overflows", ("open_gate", "bound"),
               gate(lambda g: g * g.exp() / (1 + g.exp()))),
        Mutant("gate_in_bfloat16", ("open_gate", "bound"),
               gate(lambda g: act(g * 1.003).bfloat16().to(g.dtype))),
        Mutant("row_0_gates", ("row_permutation", "bound"), gate(_first_row_of(act))),
        Mutant("row_before", ("row_permutation", "bound"), gate(lambda g: act(_row_before(g)))),
        Mutant("last_row_lost", ("row_permutation", "bound"), gate(act, _tail_rows)),
        *generic_mutants(plain),
        *batch_mutants(plain, (0,)),
    )  # fmt: skip
