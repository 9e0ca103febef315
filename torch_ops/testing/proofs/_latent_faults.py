"""Planted faults of attention to latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.faults import floored, raised
from torch_ops.testing.proof import Arguments, Mutant
from torch_ops.testing.proofs import _attention_faults as dense
from torch_ops.testing.proofs import _ragged_faults as faults
from torch_ops.testing.proofs._latents import FORM
from torch_ops.testing.proofs._paged_faults import of_pages

# Without a window the order of keys is nothing to attention.
OF_ORDER = {"pages_sorted", "pages_reversed"}
Change = Callable[[Tensor], Tensor]


def _with(**changes: Change) -> Callable[[Arguments], Arguments]:
    """Change arguments before the kernel sees them."""
    return lambda args: args | {name: change(args[name]) for name, change in changes.items()}


def _scale_of_the_width(args: Arguments) -> Arguments:
    """The scale that attention to keys of this width has by default."""
    width = args["q_nope"].shape[-1] + args["q_pe"].shape[-1]
    return args | {"scale": max(width, 1) ** -0.5}


def _head_0(x: Tensor) -> Tensor:
    return x[:, :1].expand(x.shape)


def _clipped(x: Tensor) -> Tensor:
    return x.clamp(-1, 1)


def _third_for_the_rest(x: Tensor) -> Tensor:
    """A tile of three heads whose last one serves all behind it."""
    return x[:, torch.arange(x.shape[1]).clamp(max=2)]


def mutants() -> tuple[Mutant, ...]:
    """Faults of arithmetic and of heads, of batches, of pages, and those that fit every op."""
    plant = faults.planter(FORM, faults.out_only)

    def mutant(name: str, kills: str, **pieces: Any) -> Mutant:
        return plant(name, kills, attend=dense.attention(**pieces))

    def given(name: str, kills: str, arguments: Callable[[Arguments], Arguments]) -> Mutant:
        return plant(name, kills, arguments=arguments)

    return (
        given("rotated_part_ignored", "bound", _with(q_pe=torch.zeros_like)),
        given("latents_of_queries_ignored", "bound", _with(q_nope=torch.zeros_like)),
        given("rotated_part_of_page_before", "bound", _with(kpe_cache=lambda x: x.roll(1, 0))),
        given("scale_of_the_width", "bound", _scale_of_the_width),
        given("rotated_query_of_head_0", "heads bound", _with(q_pe=_head_0)),
        given("absolute_rotated_queries", "negated bound", _with(q_pe=torch.abs)),
        given("rotated_queries_clipped", "moved_scale bound", _with(q_pe=_clipped)),
        given("rotated_keys_clipped", "moved_scale bound", _with(kpe_cache=_clipped)),
        given("rotated_queries_on_grid", "moved_scale bound",
              _with(q_pe=lambda x: (x * 4).round() / 4)),
        mutant("logits_in_bfloat16", "bound", logits=lambda s: s.bfloat16().to(s.dtype)),
        mutant("keys_shifted", "bound", k=lambda x: x.roll(1, 2)),
        mutant("absolute_values", "negated bound", v=torch.abs),
        mutant("positive_values", "negated bound", v=lambda x: x.clamp(min=0)),
        mutant("rounded_down", "negated", finish=floored),
        mutant("rounded_up", "negated", finish=raised),
        mutant("values_on_grid", "scaled_latents bound", v=lambda x: (x * 4).round() / 4),
        mutant("values_clipped", "scaled_latents bound", v=lambda x: x.clamp(-2, 2)),
        mutant("constant_added", "scaled_latents one_key bound", v=lambda x: x + 2**-5),
        mutant("half_denominator", "one_key constant_latents bound",
               softmax=dense.stale_denominator),
        mutant("last_key_dropped", "one_key constant_latents bound", softmax=dense.without_last),
        mutant("sink_in_denominator", "one_key constant_latents bound", softmax=dense.with_sink),
        mutant("weights_on_eighths", "constant_latents bound", softmax=dense.eighth),
        mutant("query_head_0", "heads bound", q=_head_0),
        mutant("head_before", "heads bound", q=lambda x: x.roll(1, 1)),
        mutant("third_head_for_the_rest", "heads bound", q=_third_for_the_rest),
        *faults.of_batches(FORM, faults.out_only),
        given("last_page_of_16_tokens", "one_page bound",
              _with(kv_last_page_len=lambda n: n.clamp(max=16))),
        *(m for m in of_pages(FORM, faults.out_only) if m.name not in OF_ORDER),
        *faults.generic(FORM, faults.out_only),
    )  # fmt: skip
