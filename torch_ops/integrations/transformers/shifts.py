"""Whether position_ids mean what the tokens of a paged batch are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ops.integrations.transformers.steps import Step

__all__ = ["Shifts"]

_FAR = 1 << 62


class Shifts:
    """By how much the position_ids of each sequence are more than its tokens' places in it.

    A whole sequence may be shifted, as padding on the left does: attention turns queries and keys
    by their distance alone.
    """

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def check(self, sequences: Sequence[int], given: Tensor, step: Step) -> None:
        """Look at the positions of a forward; waits for the device.

        Args:
            sequences: Of the batch, B.
            given: ``[B * S]``.
            step: Of this forward.

        Raises:
            ValueError: distances are others than the tokens' in their sequences.
        """
        shifts = (given.long() - step.positions).view(len(sequences), -1)
        padding = (step.slots < 0).view(len(sequences), -1)
        low = shifts.masked_fill(padding, _FAR).amin(1)
        high = shifts.masked_fill(padding, -_FAR).amax(1)
        found: dict[int, int] = {}
        for sequence, least, most in zip(
            sequences, *torch.stack((low, high)).tolist(), strict=True
        ):
            if least > most:
                continue  # padding alone
            known = found[sequence] = self._known.get(sequence, least)
            if not least == most == known:
                raise ValueError(
                    f"position_ids: received some that are {least} to {most} more than the places "
                    f"of their tokens in sequence {sequence}, accepted with a PagedCache: None, or "
                    f"all {known} more"
                )
        self._known |= found
