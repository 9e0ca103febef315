"""moe_align_block_size: sort assignments of tokens by expert, each expert's in whole blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ops import checks
from torch_ops.contracts import AlignContract
from torch_ops.declarations._experts import capacity
from torch_ops.declare import op

_OP = "moe_align_block_size"
_MOST = 2**30


@op(contract=AlignContract(), dtypes=(torch.int32,))
def moe_align_block_size(
    ids: Tensor, num_experts: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the assignments of tokens to experts, padding each expert's to whole blocks.

    Assignment i is the i-th element of ``ids``, of token ``i // k``. The first
    ``num_tokens_post_padded`` entries of ``sorted_token_ids`` are blocks of ``block_size``
    assignments of one expert, whose id ``expert_ids`` gives for each block: experts in ascending
    order, the assignments of each in ascending order, then padding.

    Args:
        ids: ``[T, k]`` int32, any strides. An id that isn't in ``[0, num_experts)``, such as -1,
            is left out.
        num_experts: E, at least 1.
        block_size: B, at least 1.

    Returns:
        ``(sorted_token_ids, expert_ids, num_tokens_post_padded)``, int32, contiguous:
        ``[C]``, ``[C / B]`` and ``[1]``, where C = ``T k + min(E, T k) (B - 1)`` rounded down to
        whole blocks, the most that any ids need. Padding, and all behind the last block, is
        ``T k`` in ``sorted_token_ids`` and -1 in ``expert_ids``.

    Raises:
        TypeError: a dtype isn't accepted.
        ValueError: a shape or a number isn't accepted, or more than 2^30 entries are needed.
    """
    flat = ids.reshape(-1)
    count = flat.shape[0]
    room = capacity(count, num_experts, block_size)
    experts = torch.arange(num_experts, device=ids.device)
    valid = (flat >= 0) & (flat < num_experts)
    # What is left out goes behind all experts, and there into one place more than is returned.
    key, order = torch.sort(torch.where(valid, flat, num_experts).long(), stable=True)
    starts = torch.searchsorted(key, experts)
    counts = torch.searchsorted(key, experts, right=True) - starts
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    shift = torch.cat([ends - padded - starts, ends.new_zeros(1)])[key]
    places = torch.where(key < num_experts, torch.arange(count, device=ids.device) + shift, room)
    sorted_ids = torch.full((room + 1,), count, dtype=torch.int32, device=ids.device)
    sorted_ids = sorted_ids.scatter(0, places, order.int())[:room].clone()
    blocks = torch.arange(room // block_size, device=ids.device) * block_size
    owner = torch.searchsorted(ends, blocks, right=True)
    expert_ids = torch.where(owner < num_experts, owner, -1).int()
    return sorted_ids, expert_ids, ends[-1:].int()


@moe_align_block_size.check
def _check(ids: Tensor, num_experts: int, block_size: int) -> None:
    if ids.dtype != torch.int32:
        checks.refuse(_OP, "ids", ids.dtype, "torch.int32", kind=TypeError)
    if ids.dim() != 2:
        checks.rank(_OP, "ids", ids, 2, "[T, k]")
    for name, value in (("num_experts", num_experts), ("block_size", block_size)):
        if not 1 <= value <= _MOST:
            checks.refuse(_OP, name, value, f"1 to {_MOST}")
    room = capacity(ids.numel(), num_experts, block_size)
    if room > _MOST:
        received = f"{block_size}, for which {room} entries are needed"
        checks.refuse(_OP, "block_size", received, f"what needs at most {_MOST} entries")


@moe_align_block_size.fake
def _fake(ids: Tensor, num_experts: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    room = capacity(ids.numel(), num_experts, block_size)
    return ids.new_empty(room), ids.new_empty(room // block_size), ids.new_empty(1)
