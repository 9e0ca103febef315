"""What swaps in models of transformers need beside the swap itself."""

from __future__ import annotations

from torch import nn

from torch_ops.integrations.acceleration import Swap
from torch_ops.integrations.transformers.families import only_records
from torch_ops.integrations.transformers.projection import FusedLinears

__all__ = ["FusingSwap", "forget_recorders"]


class FusingSwap(Swap):
    """Joins the projections of what is put in, and gives them memory of their own again."""

    def commit(self) -> None:
        """Put the replacement in."""
        if isinstance(self.replacement, FusedLinears):
            self.replacement.fuse()
        super().commit()

    def revert(self) -> None:
        """Put the original back, with the parameters that the model has now."""
        if isinstance(self.replacement, FusedLinears):
            self.replacement.unfuse()
        super().revert()
        if isinstance(self.original, nn.Linear) and isinstance(self.replacement, nn.Linear):
            self.original.out_features = self.replacement.out_features  # tokens may be more now


def forget_recorders(model: nn.Module) -> None:
    """Let transformers install its recording hooks anew, when outputs are asked for again.

    It installs them once a model, so attention that was not in place then would stay without.
    """
    for module in model.modules():
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if only_records(hook)]:
            del hooks[key]
        if "_output_capturing_hooks_installed" in vars(module):
            del module._output_capturing_hooks_installed
