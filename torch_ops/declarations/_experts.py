"""What ops of experts share: how much room sorted assignments need."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["capacity"]


def capacity(count: Any, num_experts: Any, block_size: Any) -> Any:
    """Give how many entries any assignments need at most, each expert's in whole blocks.

    At most ``min(E, count)`` experts are chosen, each with at most ``B - 1`` entries of padding.

    Args:
        count: Number of assignments; an int or a symbol of one, as all three.
        num_experts: E.
        block_size: B.
    """
    chosen = torch.sym_min(count, num_experts)
    return (count + chosen * (block_size - 1)) // block_size * block_size
