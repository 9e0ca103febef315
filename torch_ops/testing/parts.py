"""Exact results for parts of a call that is too large for the float64 oracle.

A part is a smaller call of the same op, whose results are the whole call's on some rows, or, for
attention, on some queries and heads, or on some sequences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations import catalogue
from torch_ops.testing.compare import ViolationError, check_output
from torch_ops.testing.proof import Arguments, Output, Proof
from torch_ops.testing.proofs._latents import FORM as LATENTS
from torch_ops.testing.proofs._paged import DECODE, PREFILL
from torch_ops.testing.proofs._ragged import PACKED
from torch_ops.testing.proofs._ragged_laws import reordered

FORMS = (PACKED, PREFILL, DECODE, LATENTS)
# All rows read these; everything else has a row a token along its first axis.
SHARED = ("weight", "bias", "cos_sin_cache", "b", "scale_b", "w_gate_up", "w_down")
ROW_ELEMENTS = 1 << 22  # of all tensors of a part together
LOGITS = 1 << 24  # the oracle holds about six float64 values for each
_Take = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """Some of a call.

    Attributes:
        name: What it is, for messages.
        args: Arguments of the smaller call.
        take: Takes its results out of an output of the whole call.
    """

    name: str
    args: Arguments
    take: _Take


@dataclass(frozen=True)
class Expected:
    """Exact outputs and bounds of a part, on the CPU."""

    part: Part
    outputs: tuple[Output, ...]


def expected_of(proof: Proof, args: Arguments) -> list[Expected]:
    """Ask the oracle, on the device of the arguments, about parts of a call."""
    contract, found = catalogue()[proof.op].contract, []
    args = {n: a.contiguous() if isinstance(a, Tensor) else a for n, a in args.items()}
    device = next(a.device for a in args.values() if isinstance(a, Tensor))
    for part in parts_of(proof.op, args):
        with torch.device(device):  # masks that the oracle makes are where its tensors are
            outputs = proof.oracle(part.args, contract)
        found.append(Expected(part, tuple(_on_cpu(output) for output in outputs)))
    return found


def _on_cpu(output: Output) -> Output:
    bound = None if output.bound is None else output.bound.cpu()
    return dataclasses.replace(output, value=output.value.cpu(), bound=bound)


def outputs_of(op: str, args: Arguments) -> tuple[Tensor, ...]:
    """Give the outputs of a call as meta tensors; of a mutating op, what it writes."""
    declaration = catalogue()[op]
    meta = {n: a.to("meta") if isinstance(a, Tensor) else a for n, a in args.items()}
    if declaration.mutates:
        return tuple(meta[name] for name in declaration.mutates)
    result = declaration.faker(*meta.values())
    return (result,) if isinstance(result, Tensor) else tuple(result)


def check(
    op: str, args: Arguments, outputs: Sequence[Tensor], expected: Sequence[Expected]
) -> float:
    """Compare outputs with what they have to be.

    Returns:
        The largest error as a part of its bound.

    Raises:
        ViolationError: an output has another shape or dtype, holds NaN where it may not, or an
            element of a part is outside of its bound.
    """
    facts = [[(list(t.shape), t.dtype) for t in made] for made in (outputs, outputs_of(op, args))]
    if facts[0] != facts[1]:
        raise ViolationError("contract", f"received {facts[0]}, accepted {facts[1]}")
    ratios = [
        check_output(each.part.take(got), want)
        for each in expected
        for got, want in zip(outputs, each.outputs, strict=True)
    ]
    _refuse_nan(outputs, expected)
    return max(ratios, default=0.0)


def _refuse_nan(outputs: Sequence[Tensor], expected: Sequence[Expected]) -> None:
    """Refuse NaN, also outside of the parts: it is what memory that isn't written holds."""
    exact = [output.value for each in expected for output in each.outputs]
    if any(bool(value.isnan().any()) for value in exact):
        return
    for output in outputs:
        count = int(output.isnan().sum())
        if count:
            raise ViolationError("bound", f"{count} elements are NaN, in parts or outside of them")


def is_whole(op: str) -> bool:
    """Whether a result depends on all rows, as a scale of a tensor or a sum over rows does."""
    contract = catalogue()[op].contract
    return getattr(contract, "per", None) == "tensor" or hasattr(contract, "vectors")


def parts_of(op: str, args: Arguments) -> list[Part]:
    """Give the whole call where it is small, else parts that lie at both ends and in between."""
    if "kv_indptr" in args:
        return list(_sequence_parts(args))
    if {"q", "k", "v"} <= args.keys():
        return list(_attention_parts(args))
    if catalogue()[op].mutates and "slot_mapping" in args:
        return [Part("whole caches", args, lambda output: output)]
    if is_whole(op):
        return [Part("whole tensor", args, lambda output: output)]
    return list(_row_parts(args))


def _sequence_parts(args: Arguments) -> Iterator[Part]:
    """The first, middle and last sequence: the last of its queries, which stand at its end."""
    form = next(form for form in FORMS if form.arguments == tuple(args))
    runs, heads = form.runs(args), args[form.queries[0]].shape[1]
    for b in sorted({0, len(runs) // 2, len(runs) - 1}) if runs else ():
        smaller, rows = reordered(form, args, [b])
        count = max(1, LOGITS // (heads * max(len(runs[b].keys[0]), 1)))
        rows = rows[-count:]
        if "qo_indptr" in args:
            smaller["q"] = args["q"][rows]
            smaller["qo_indptr"] = args["qo_indptr"].new_tensor([0, len(rows)])

        def take(output: Tensor, rows: list[int] = rows) -> Tensor:
            return output[rows]

        yield Part(f"sequence {b}, last {len(rows)} queries", smaller, take)


def _row_parts(args: Arguments) -> Iterator[Part]:
    """Rows know only themselves: the first, the last and some between, in one call."""
    tensors = {n: a for n, a in args.items() if isinstance(a, Tensor) and n not in SHARED}
    rows = next(iter(tensors.values())).shape[0]
    by_row = [n for n, a in tensors.items() if a.dim() and a.shape[0] == rows]
    elements = sum(args[name].numel() for name in by_row)
    if elements <= ROW_ELEMENTS or args[by_row[0]].dim() == 1:
        yield Part("all rows", args, lambda output: output)
        return
    count = min(max(3, ROW_ELEMENTS * rows // elements), rows)
    third = math.ceil(count / 3)
    generator = torch.Generator().manual_seed(rows)
    between = torch.randint(0, rows, (third,), generator=generator)
    chosen = torch.cat([torch.arange(third), between, torch.arange(rows - third, rows)])
    chosen = chosen.unique().to(args[by_row[0]].device)

    def take(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, chosen)

    smaller = {n: take(a) if n in by_row else a for n, a in args.items()}
    yield Part(f"{len(chosen)} of {rows} rows", smaller, take)


def _attention_parts(args: Arguments) -> Iterator[Part]:
    """Queries of the first and the last sequence and key head: the first, middle and last."""
    q, k = args["q"], args["k"]
    batch, queries, heads, _ = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    if batch * heads * queries * keys <= LOGITS:
        yield Part("all queries", args, lambda output: output)
        return
    group = heads // kv_heads
    chosen = sorted({(0, 0), (batch - 1, kv_heads - 1)})
    count = max(1, min(queries, LOGITS // (len(chosen) * 3 * group * keys)))
    for sequence, head in chosen:
        for first in _starts(args, queries, count):
            yield _attention_part(args, sequence, head, first, count)


def _starts(args: Arguments, queries: int, count: int) -> list[int]:
    """Give where parts begin: a window with later keys too is cut exactly at its end alone."""
    if args["window_left"] >= 0 and not args["is_causal"]:
        return [queries - count]
    return sorted({0, (queries - count) // 2, queries - count})


def _attention_part(args: Arguments, sequence: int, head: int, first: int, count: int) -> Part:
    """Cut some queries out; causal ones see no key past the last of them, which stays aligned."""
    q, k, v = (args[name] for name in ("q", "k", "v"))
    group, keys = q.shape[2] // k.shape[2], k.shape[1]
    seen = keys
    if args["is_causal"]:
        seen = max(0, keys - q.shape[1] + first + count)
    heads = slice(head * group, (head + 1) * group)

    def take(output: Tensor) -> Tensor:
        return output[sequence : sequence + 1, first : first + count, heads]

    smaller: dict[str, Any] = {"q": take(q).contiguous()}
    for name, tensor in (("k", k), ("v", v)):
        part = tensor[sequence : sequence + 1, :seen, head : head + 1]
        smaller[name] = part.contiguous()
    where = f"sequence {sequence}, key head {head}, queries {first} to {first + count - 1}"
    return Part(where, {**args, **smaller}, take)
