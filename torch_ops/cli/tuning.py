"""``tune``: measures kernels and writes the table that `torch_ops.load_tuning_table` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_ops import tuning
from torch_ops.cli.output import Report, Table
from torch_ops.declarations import catalogue
from torch_ops.demo.progress import Progress
from torch_ops.errors import TorchOpsError
from torch_ops.integrations.extras import require
from torch_ops.platform import Platform
from torch_ops.selector import require_op

__all__ = ["report"]

LIMIT = {"cpu": 1 << 26, "cuda": 1 << 28}  # elements of a tensor
DTYPE = {"cpu": ("float32",), "cuda": ("bfloat16",)}
Rows = dict[str, dict[str, tuning.Row]]


def report(
    ops: Sequence[str],
    shapes: str,
    dtypes: Sequence[str],
    device: torch.device,
    path: Path | None,
) -> Report:
    """Measure the named ops, or all that have calls of these shapes.

    With a path the table is written after each op; rows of a table that is there and holds are
    kept, but for those that are measured anew.

    Raises:
        TorchOpsError: an op, the shapes or a table that is there can't be used, or a kernel left
            the GPU unusable.
    """
    require("torch-ops tune", ("hypothesis",), "pip install 'torch-ops[test]'")
    for op in ops:
        require_op(op)
    name = tuning.device_name(Platform.detect(device))
    kept = _kept(path, name)
    measured: Rows = {}
    left_out: list[str] = []
    progress = Progress()
    for op in ops or sorted(catalogue()):
        with progress.step(f"tune {op}"):
            rows = _rows(op, shapes, dtypes or DTYPE[device.type], device, progress, left_out)
        if not rows:
            continue
        measured[op] = rows
        kept[op] = kept.get(op, {}) | rows
        if path is not None:
            _write(path, name, kept)
    data = tuning.written(name, {op: list(rows.values()) for op, rows in measured.items()})
    return _shown(data, left_out)


def _kept(path: Path | None, device: str) -> Rows:
    if path is None or not path.exists():
        return {}
    table = tuning.read(path)
    why = table.refusal([device])
    if why is not None:
        raise TorchOpsError(
            f"--save {path}: there is a table of {why}; save elsewhere, or remove it"
        )
    return {op: dict(rows) for op, rows in table.rows.items()}


def _write(path: Path, device: str, rows: Rows) -> None:
    """Replace the file at once: who reads it meanwhile finds a whole one."""
    data = tuning.written(device, {op: list(found.values()) for op, found in sorted(rows.items())})
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


def _rows(
    op: str,
    shapes: str,
    dtypes: Sequence[str],
    device: torch.device,
    progress: Progress,
    left_out: list[str],
) -> dict[str, tuning.Row]:
    """Measure an op's calls; those that can't be are added to what is left out."""
    from torch_ops.testing.compare import DeviceLostError
    from torch_ops.testing.proof import proof_names, proof_of
    from torch_ops.tuner import shapes as calls
    from torch_ops.tuner.measure import measure
    from torch_ops.tuner.timing import median_us

    if op not in proof_names():
        return {}
    file = Path(shapes)
    specs = [
        spec
        for dtype in dtypes
        for spec in (
            calls.of_file(file, op, dtype) if file.exists() else calls.of_model(op, dtype, shapes)
        )
    ]
    found = {}
    wanted = calls.one_each(proof_of(op), specs, LIMIT[device.type])
    for number, (bucket, spec) in enumerate(wanted.items(), 1):
        progress.note(f"tune {op}: {number} of {len(wanted)}, {bucket}")
        try:
            row = measure(spec, bucket, device, median_us)
        except DeviceLostError as lost:
            raise TorchOpsError(
                f"tune {op}, {bucket}: the GPU was lost: {lost.detail}; disable the backend "
                f"(TORCH_OPS_DISABLE) and start anew\n  spec: {spec.to_json()}"
            ) from lost
        except torch.OutOfMemoryError as error:
            left_out.append(f"{op} {bucket}: {str(error).partition(chr(10))[0]}")
            continue
        if row.us:
            found[bucket] = row
        else:
            left_out.append(f"{op} {bucket}: no kernel is right: {dict(row.rejected)}")
    return found


def _shown(data: dict[str, object], left_out: list[str]) -> Report:
    rows = data["rows"]
    assert isinstance(rows, dict)
    lines = []
    for op, buckets in rows.items():
        for bucket, cells in buckets.items():
            us = cells["us"]
            times = ", ".join(f"{name} {time:.4g}" for name, time in us.items())
            left = ", ".join(f"{name}: {why}" for name, why in cells.get("rejected", {}).items())
            lines.append((op, next(iter(us)), times, bucket, left))
    columns = ("op", "fastest", "us", "bucket", "left out")
    parts: list[Table | str] = [Table(f"Measured on {data['device']}", columns, lines)]
    parts += [f"not measured: {line}" for line in left_out]
    return Report(data, parts)
