"""How much work a call is: bytes that have to move and floating point operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ops.testing.parts import outputs_of
from torch_ops.testing.proof import Arguments

ATTENTION = ("attention", "attention_with_lse")


class Work(NamedTuple):
    """Work of one call.

    Attributes:
        bytes: Every element that is needed read once, every output written once.
        flops: Floating point operations, for ops that are bound by them; else None.
    """

    bytes: int
    flops: int | None


def work(op: str, args: Arguments) -> Work:
    """Count a call's work.

    bytes = sum of all tensors that are read + sum of all that are written, where an argument that
    the op changes is both. Of a table of cosines and sines one row a token is read; of a cache that
    is appended to, what is appended is written.
    flops, of attention = 2 (D + Dv) B H pairs: a multiplication and an addition for each element
    of a query and of a value, for each visible pair of a query and a key.
    """
    if "slot_mapping" in args:
        rows = sum(_bytes(args[name]) for name in ("q", "k", "v") if name in args)
        indices = sum(_bytes(args[name]) for name in ("positions", "slot_mapping") if name in args)
        return Work(2 * rows + indices + _angles(args), None)
    read = [a for n, a in args.items() if isinstance(a, Tensor) and n != "cos_sin_cache"]
    moved = sum(_bytes(tensor) for tensor in (*read, *outputs_of(op, args))) + _angles(args)
    return Work(moved, _attention_flops(args) if op in ATTENTION else None)


def _angles(args: Arguments) -> int:
    """A row of cosines and sines for each position."""
    if "cos_sin_cache" not in args:
        return 0
    cache, positions = args["cos_sin_cache"], args["positions"]
    return int(positions.numel() * cache.shape[-1] * cache.element_size())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _attention_flops(args: Arguments) -> int:
    batch, queries, heads, head_dim = args["q"].shape
    keys, value_dim = args["k"].shape[1], args["v"].shape[3]
    pairs = visible_pairs(queries, keys, args["is_causal"], args["window_left"])
    return int(2 * (head_dim + value_dim) * batch * heads * pairs)


def visible_pairs(queries: int, keys: int, is_causal: bool, window_left: int) -> int:
    """Count the pairs of a query and a key that it attends to; the last query is at the last key.

    A causal square of n by n has n (n + 1) / 2 of them, about half.
    """
    place = torch.arange(queries) + keys - queries
    last = place.clamp(max=keys - 1) if is_causal else torch.full_like(place, keys - 1)
    first = (place - window_left).clamp(min=0) if window_left >= 0 else torch.zeros_like(place)
    return int((last - first + 1).clamp(min=0).sum())
