"""``demo`` and ``serve-demo``: a real model answers through torch_ops."""

from __future__ import annotations

import torch

import torch_ops.demo
from torch_ops.cli.output import Report

__all__ = ["report", "serving"]


def report(question: str | None) -> Report:
    """Run the demo; red where something isn't as it should be.

    Raises:
        TorchOpsError: a package is missing, or the model can't be served.
    """
    found = torch_ops.demo.run(question or torch_ops.demo.QUESTION)
    return Report(found.data, (str(found),), found.ok)


def serving(requests: int, device: torch.device) -> Report:
    """Run the serving demo; red where something isn't as it should be.

    Raises:
        TorchOpsError: a package is missing, or the model can't be served.
    """
    from torch_ops.demo.serving import ServeSettings, serve

    found = serve(ServeSettings(requests=requests), str(device))
    return Report(found.data, (str(found),), found.ok)
