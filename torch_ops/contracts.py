"""Contract fields of ops: what a kernel promises beyond shapes, where real kernels diverge."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

__all__ = [
    "PROMISES",
    "AlignContract",
    "AttentionContract",
    "AttentionGradientContract",
    "CacheContract",
    "Contract",
    "ExpertsContract",
    "GateContract",
    "MergeContract",
    "NormContract",
    "NormGradientContract",
    "QuantizationContract",
    "RaggedAttentionContract",
    "RopeCacheContract",
    "RopeContract",
    "RoutingContract",
    "SamplingContract",
    "ScaledMatmulContract",
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
class NormGradientContract(Contract):
    """Promises of the gradients of a normalization.

    Attributes:
        arithmetic: ``fp32_all``: everything in float32, statistics of rows too, rounded once.
        vectors: Gradients of weight and bias are sums over all rows, in any order that equal calls
            repeat.
    """

    arithmetic: Literal["fp32_all"] = "fp32_all"
    vectors: Literal["summed_over_rows"] = "summed_over_rows"


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
class AttentionGradientContract(AttentionContract):
    """Promises of the gradients of attention: not that equal inputs give equal bits.

    Attributes:
        row_sum: ``sum(p * dp)`` of a query may be had as ``sum(grad * out)``, of the rounded
            output, and its probabilities of the rounded LSE; not for float64.
        group_dtype: Dtype of a query head's share in the gradients of its key head.
    """

    deterministic: bool = False
    row_sum: Literal["exact", "of_rounded"] = "of_rounded"
    group_dtype: Literal["float32", "input"] = "input"


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
class RopeCacheContract(RopeContract, CacheContract):
    """Promises of a rotary embedding whose keys are written into a cache: those of both."""


@dataclass(frozen=True)
class MergeContract(Contract):
    """Promises of merging two attention states: as `AttentionContract`."""

    empty_row: Literal["zero_and_minus_inf"] = "zero_and_minus_inf"
    lse_base: Literal["e"] = "e"


@dataclass(frozen=True)
class ScaledMatmulContract(Contract):
    """Promises of a product of quantized matrices.

    Attributes:
        accumulator: ``int32``: exact. ``tensor_core``: products of 32 are added at once to 13 bits
            behind the largest one, as tensor cores do with float8, float32 included.
        rounding: ``once``: the scaled sum and the bias are added in float32 and rounded once.
    """

    accumulator: Literal["int32", "tensor_core"] = "tensor_core"
    rounding: Literal["once"] = "once"


@dataclass(frozen=True)
class SamplingContract(Contract):
    """Promises of an op on rows of probabilities, each of which is looked at alone.

    Attributes:
        ties: Of equal probabilities the one of the lowest index comes first, so that exactly k are
            kept.
        mass: A mass is compared as if its probabilities were added exactly, on the row as it is
            given: it needn't add up to 1, and what another filter drops counts.
        renormalized: Whether what is kept is divided by its sum.
        not_finite: What is found where a filtered row holds NaN or an infinity: NaN everywhere, or
            the index of the first of them.
        no_mass: What is found where nothing in a filtered row is positive: zeros, or index 0.
        uniform: Where the random number of a row comes from, None if there is none.
    """

    ties: Literal["lowest_index_first"] = "lowest_index_first"
    mass: Literal["exact_and_original"] = "exact_and_original"
    renormalized: bool = True
    not_finite: Literal["nan_row", "first_of_them"] = "nan_row"
    no_mass: Literal["zeros", "index_0"] = "zeros"
    uniform: Literal["philox4x32_10"] | None = None


@dataclass(frozen=True)
class QuantizationContract(Contract):
    """Promises of a quantization: ``x`` is about ``codes * scale``.

    Attributes:
        codes: ``e4m3``: float8 of the device's flavor, up to 448 (240 as fnuz, on gfx942).
            ``int8``: from -127 to 127.
        per: What shares a scale, which is amax / largest code.
        scale_dtype: Dtype of scales.
        amax_floor: An amax below this counts as this, so that zeros have a finite scale and codes
            of 0.
        rounding: Codes are the nearest ones; of two as near, the even one.
        overflow: What lies beyond the largest code becomes that; nothing finite becomes NaN.
        non_finite: A NaN or an infinity leaves undefined what shares its scale, and nothing else.
        quantized: What is quantized is ``input``, or, of an op that computes it first, that
            ``rounded`` to the dtype of x: as the two ops one after the other do.
    """

    codes: Literal["e4m3", "int8"] = "e4m3"
    per: Literal["token", "group", "tensor"] = "token"
    scale_dtype: Literal["float32"] = "float32"
    amax_floor: float = 1e-10
    rounding: Literal["nearest_even"] = "nearest_even"
    overflow: Literal["saturates"] = "saturates"
    non_finite: Literal["undefined_where_shared"] = "undefined_where_shared"
    quantized: Literal["input", "rounded"] = "input"


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
