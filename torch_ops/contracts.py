"""Contract fields of ops: what a kernel promises beyond shapes, where real kernels diverge."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

__all__ = [
    "PROMISES",
    "AlignContract",
    "AttentionContract",
    "CacheContract",
    "Contract",
    "ExpertsContract",
    "GateContract",
    "MergeContract",
    "NormContract",
    "RaggedAttentionContract",
    "RopeContract",
    "RoutingContract",
]


@dataclass(frozen=True)
class Contract:
    """Promises of every op, of kernels whose backend says nothing else.

    Attributes:
        deterministic: Equal inputs give equal bits.
        batch_invariant: A row's bits don't depend on the other rows or on their number.
    """

    deterministic: bool = True
    batch_invariant: bool = False


PROMISES = tuple(field.name for field in fields(Contract))
"""Promises that a policy can require; a backend's package may make or withdraw them."""


@dataclass(frozen=True)
class NormContract(Contract):
    """Promises of a normalization.

    Attributes:
        weight_mul: ``fp32_all``: everything in float32, rounded once. ``cast_then_mul``: the
            normalized row is rounded before the weight. ``one_plus_weight_fp32``: as
            ``fp32_all`` with 1 + weight, added in float32.
        residual: ``norm_of_rounded``: the norm is of the residual as it is stored;
            ``norm_of_exact``: of the unrounded sum; None without a residual.
    """

    weight_mul: Literal["fp32_all", "cast_then_mul", "one_plus_weight_fp32"] = "fp32_all"
    residual: Literal["norm_of_rounded", "norm_of_exact"] | None = None


@dataclass(frozen=True)
class GateContract(Contract):
    """Promises of a gated activation.

    Attributes:
        activation: Which function is applied to the gate.
        rounding: ``once``: after the product; ``activation_first``: also before it.
    """

    activation: Literal["silu", "gelu_erf", "gelu_tanh"] = "silu"
    rounding: Literal["once", "activation_first"] = "once"


@dataclass(frozen=True)
class RopeContract(Contract):
    """Promises of a rotary embedding.

    Attributes:
        pairing: Element i turns with i + rotary_dim / 2 (neox) or i + 1 (interleaved).
        cache_dtype: Dtype of cosines and sines.
        arithmetic: ``fp32``: rotated in float32 and rounded once.
    """

    pairing: Literal["half_of_rotary_dim"] = "half_of_rotary_dim"
    cache_dtype: Literal["float32"] = "float32"
    arithmetic: Literal["fp32"] = "fp32"


@dataclass(frozen=True)
class AttentionContract(Contract):
    """Promises of an attention op.

    Attributes:
        causal: The last query attends to the last key.
        empty_row: A query with nothing to attend gives zeros and an LSE of -inf.
        lse_base: The LSE is a natural logarithm.
        window: ``window_left`` counts the keys before the query; the query's own is extra.
        soft_cap: ``cap * tanh(logit / cap)`` is applied before the mask.
        masked_nan: Whether NaN at a masked place of a tensor that is read may propagate.
        p_dtype: Dtype in which probabilities meet the values.
    """

    causal: Literal["bottom_right"] = "bottom_right"
    empty_row: Literal["zero_and_minus_inf"] = "zero_and_minus_inf"
    lse_base: Literal["e"] = "e"
    window: Literal["keys_before_query"] = "keys_before_query"
    soft_cap: Literal["before_mask"] = "before_mask"
    masked_nan: Literal["may_propagate", "ignored"] = "may_propagate"
    p_dtype: Literal["float32", "input"] = "input"


@dataclass(frozen=True)
class RaggedAttentionContract(AttentionContract):
    """Promises of attention over sequences of different lengths, packed or in pages.

    Attributes:
        padding_row: A row of queries behind the last sequence attends to nothing.
        unread: Rows and slots behind a sequence's end, and pages that no sequence lists, never
            influence a result, NaN or not.
    """

    padding_row: Literal["zero_and_minus_inf"] = "zero_and_minus_inf"
    unread: Literal["ignored"] = "ignored"


@dataclass(frozen=True)
class CacheContract(Contract):
    """Promises of writing into a cache.

    Attributes:
        negative_slot: What happens to a row with a negative slot.
        repeated_slot: Which of several rows with one slot is found there afterwards.
        others: What happens to slots that no row names.
    """

    negative_slot: Literal["skipped"] = "skipped"
    repeated_slot: Literal["undefined"] = "undefined"
    others: Literal["unchanged"] = "unchanged"


@dataclass(frozen=True)
class MergeContract(Contract):
    """Promises of merging two attention states: as `AttentionContract`."""

    empty_row: Literal["zero_and_minus_inf"] = "zero_and_minus_inf"
    lse_base: Literal["e"] = "e"


@dataclass(frozen=True)
class RoutingContract(Contract):
    """Promises of choosing experts.

    Attributes:
        ranked_by: Experts are compared by their logits: probabilities that round to one number,
            as all do that underflow, are told apart.
        ties: Of equal logits the one of the lowest expert ranks first.
        nan_logit: Ranks as -inf, so that the ids of a row are distinct and experts always.
        no_softmax: Weights of a row whose softmax doesn't exist: with NaN, +inf, or -inf alone.
    """

    ranked_by: Literal["logit"] = "logit"
    ties: Literal["lowest_expert"] = "lowest_expert"
    nan_logit: Literal["ranks_last"] = "ranks_last"
    no_softmax: Literal["nan"] = "nan"


@dataclass(frozen=True)
class AlignContract(Contract):
    """Promises of sorting assignments of tokens by expert, in blocks.

    Attributes:
        order: Of the assignments of one expert.
        padding: What fills a block, and all behind the last one.
        unused_block: The expert of a block behind the last one.
        invalid_id: What happens to an id that is no expert's, as -1.
    """

    order: Literal["ascending"] = "ascending"
    padding: Literal["number_of_assignments"] = "number_of_assignments"
    unused_block: Literal["minus_one"] = "minus_one"
    invalid_id: Literal["left_out"] = "left_out"


@dataclass(frozen=True)
class ExpertsContract(Contract):
    """Promises of running a layer of experts.

    Attributes:
        hidden: Dtype in which what lies between the two products is kept.
        partial: Dtype in which the result of one expert, times its weight, is kept.
        invalid_id: What happens to an id that is no expert's, as -1.
        unselected: Whether weights of experts that no token chose are read.
        zero_weight: Whether an expert with a weight of 0 is run: its NaN reaches the sum.
    """

    hidden: Literal["input"] = "input"
    partial: Literal["float32", "input"] = "float32"
    invalid_id: Literal["contributes_nothing"] = "contributes_nothing"
    unselected: Literal["never_read"] = "never_read"
    zero_weight: Literal["runs"] = "runs"
