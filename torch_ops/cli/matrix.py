"""``matrix``: what may run where, and what that rests on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch_ops import support
from torch_ops.cli.output import Report, Table
from torch_ops.integrations.extras import require

__all__ = ["report"]


def report(evidence: Path | None, markdown: bool) -> Report:
    """Gather the matrix, backends of installed plugins included; the page has none of them.

    Raises:
        TorchOpsError: the evidence can't be read, or a package is missing.
    """
    require("torch-ops matrix", ("hypothesis",), "pip install 'torch-ops[test]'")
    cells = support.matrix(support.evidence(evidence), plugins=not markdown)
    data = {"cells": [dataclasses.asdict(cell) for cell in cells]}
    if markdown:
        return Report(data, (support.markdown(cells).removesuffix("\n"),))
    rows = [
        (c.op, c.backend, c.platform, c.dtype, "yes" if c.usable else "no", c.evidence)
        for c in cells
    ]
    columns = ("op", "backend", "platform", "dtype", "chosen", "evidence, or why not")
    return Report(data, (Table("Support", columns, rows),))
