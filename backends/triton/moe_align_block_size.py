"""moe_align_block_size in Triton."""

from torch import Tensor

from ._align import MOST_EXPERTS, align

__all__ = ["moe_align_block_size", "supports"]


def supports(ids: Tensor, num_experts: int, block_size: int) -> str | None:
    if num_experts > MOST_EXPERTS:
        return (
            f"num_experts {num_experts} (supported: up to {MOST_EXPERTS}, whose counts a program "
            "holds)"
        )
    return None


def moe_align_block_size(
    ids: Tensor, num_experts: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    return align(ids, num_experts, block_size)
