"""Tables of measured times: which are loaded, and the row that speaks for a call.

A table holds for one device, the installed versions and the kernels that were measured; any other
is refused. It says in which order the kernels of a bucket of calls are tried, see
`torch_ops.buckets`. Nothing is measured here, nor ever in a call: ``torch-ops tune`` does that.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import platform as _host
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_ops import buckets, policy
from torch_ops.errors import TuningTableError, listing
from torch_ops.platform import Platform
from torch_ops.registry import registry

__all__ = ["Row", "Table", "clear_tuning_table", "load_tuning_table"]

FORMAT = 1
SHIPPED = Path(__file__).with_name("tables")
PACKAGES = ("torch", "triton", "flashinfer-python", "sglang-kernel")
NONE = "none"
TIE = 1.02
"""Times over the fastest one's that count as equal: one kernel, captured twice, differs by that."""
_FIELDS = ("format", "device", "versions", "registry", "rows")


@dataclass(frozen=True)
class Row:
    """What was measured for the calls of one bucket.

    Attributes:
        bucket: See `torch_ops.buckets.bucket`.
        us: Median times in microseconds by backend, the fastest first.
        rejected: Backends that were left out, and why: wrong, or raised.
    """

    bucket: str
    us: Mapping[str, float]
    rejected: Mapping[str, str] = field(default_factory=dict)

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the backends, the fastest first."""
        return tuple(self.us)

    @property
    def ties(self) -> tuple[tuple[str, int], ...]:
        """Each backend, the fastest first, and how many take up to `TIE` times as long.

        All that `preferred` goes by, whichever of them can serve.
        """
        times = self.us.values()
        return tuple(
            (name, sum(us <= other <= us * TIE for other in times)) for name, us in self.us.items()
        )

    def preferred(self, declared: Sequence[str]) -> tuple[str, ...]:
        """Name those that were measured, the fastest first; what ties with it as it is declared.

        Args:
            declared: The declared order of the backends that can serve.
        """
        served = [name for name in declared if name in self.us]
        least = min((self.us[name] for name in served), default=0.0)
        tied = [name for name in served if self.us[name] <= least * TIE]
        return (*tied, *(name for name in self.us if name in served and name not in tied))


@dataclass(frozen=True)
class Table:
    """A table that was read.

    Attributes:
        path: Its file.
        device: Name of the device that was measured.
        versions: Versions of `PACKAGES` there, None for those that weren't installed.
        registry: `fingerprint` of its ops there.
        rows: By op and bucket.
        digest: Of the file's content.
    """

    path: Path
    device: str
    versions: Mapping[str, str | None]
    registry: str
    rows: Mapping[str, Mapping[str, Row]]
    digest: str

    def orders(self, op: str) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
        """Give what the table decides of an op, alike for tables that decide alike."""
        rows = self.rows.get(op, {})
        return tuple((name, rows[name].ties) for name in sorted(rows))

    def refusal(self, devices: Iterable[str]) -> str | None:
        """Give why the table doesn't hold on these devices and this installation, or None."""
        devices = list(devices)
        if self.device not in devices:
            return f"device {self.device!r} (here: {listing(devices)})"
        for package, here in versions().items():
            then = self.versions.get(package)
            if then != here:
                return f"{package} {then or 'not installed'} (here: {here or 'not installed'})"
        here = fingerprint(self.rows)
        if self.registry != here:
            return f"registry fingerprint {self.registry} (here, of the same ops: {here})"
        return None


class Active(NamedTuple):
    """The table of a device; where it isn't used, why."""

    table: Table | None
    refusal: str | None


_loaded: dict[str, Table] = {}
_active: dict[str, Active] = policy.track({})


def device_name(platform: Platform) -> str:
    """Name a device as tables do: a GPU by its product, a CPU by its model."""
    return _cpu_name() if platform.device == "cpu" else platform.name


@functools.lru_cache(maxsize=1)
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else _host.machine() or "CPU"


def devices_here() -> list[str]:
    """Name the devices of this machine."""
    gpus = range(torch.cuda.device_count())
    found = [Platform.cpu(), *(Platform.detect(f"cuda:{index}") for index in gpus)]
    return list(dict.fromkeys(map(device_name, found)))


def versions() -> dict[str, str | None]:
    """Give the installed versions of the packages that kernels come from."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return {**found, "torch": torch.__version__}


def fingerprint(ops: Iterable[str]) -> str:
    """Digest of what is declared and registered of some ops, as far as it was measured.

    Backends that no declared order names aren't, and neither is Python code: a table made under
    one version of Python holds under another one.
    """
    from torch_ops.declarations import catalogue

    digest = hashlib.sha256()
    for op in sorted(ops):
        declaration = catalogue().get(op)
        if declaration is None:
            digest.update(f"{op}|unknown\n".encode())
            continue
        digest.update(f"{op}{declaration.schema}|{declaration.contract}\n".encode())
        named = {name for order in declaration.order.values() for name in order}
        for spec in sorted(registry.get(op), key=lambda spec: spec.backend.value):
            if spec.backend.value in named:
                requires = sorted(map(repr, spec.requires))
                digest.update(f"{spec.backend.value}|{spec.target}|{requires}\n".encode())
    return digest.hexdigest()[:16]


def read(path: str | Path) -> Table:
    """Read a table, without asking whether it holds here.

    Raises:
        TuningTableError: the file can't be read, or is no table; says where.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        data = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(path, f"it can't be read: {type(error).__name__}: {error}") from error
    if not isinstance(data, dict) or not set(_FIELDS) <= data.keys():
        got = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise _refused(path, f"it has {got} (accepted: an object with {listing(_FIELDS)})")
    if data["format"] != FORMAT:
        raise _refused(path, f"its format is {data['format']!r} (accepted: {FORMAT})")
    try:
        rows = {
            op: {name: _row(name, cells) for name, cells in found.items()}
            for op, found in data["rows"].items()
        }
        found = {str(name): version for name, version in data["versions"].items()}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise _refused(path, f"it is malformed: {type(error).__name__}: {error}") from error
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Table(path, str(data["device"]), found, str(data["registry"]), rows, digest)


def _row(name: str, cells: Mapping[str, Any]) -> Row:
    us = {str(backend): float(time) for backend, time in cells["us"].items()}
    for backend, time in us.items():
        if not (math.isfinite(time) and time > 0):
            raise ValueError(f"{name}: the time of {backend} is {time} us (accepted: over 0)")
    ranked = dict(sorted(us.items(), key=lambda item: item[1]))
    return Row(name, ranked, {str(b): str(why) for b, why in cells.get("rejected", {}).items()})


def written(device: str, rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Give a table of this installation as what its file holds."""
    return {
        "format": FORMAT,
        "device": device,
        "versions": versions(),
        "registry": fingerprint(rows),
        "rows": {
            op: {
                row.bucket: {"us": dict(row.us)}
                | ({"rejected": dict(row.rejected)} if row.rejected else {})
                for row in found
            }
            for op, found in rows.items()
        },
    }


def _refused(path: Path, why: str) -> TuningTableError:
    return TuningTableError(f"tuning table {str(path)!r} is refused: {why}")


def load_tuning_table(path: str | Path) -> None:
    """Let measured times decide where nobody else does, in the whole process, on one device.

    It stands in for another table of that device. Compiled graphs that depend on it compile anew.

    Args:
        path: What ``torch-ops tune --save`` wrote.

    Raises:
        TuningTableError: it can't be read, or is of another device, of other versions or of other
            kernels; names both. Nothing is changed then.
    """
    policy.refuse_in_traced_code("load_tuning_table")
    table = read(path)
    why = table.refusal(devices_here())
    if why is not None:
        raise _refused(table.path, f"it is of {why}")
    policy.change(lambda: _loaded.update({table.device: table}))


def clear_tuning_table() -> None:
    """Forget what `load_tuning_table` loaded: the environment's and the shipped table hold again.

    ``TORCH_OPS_TUNING_TABLE=none`` switches these off.
    """
    policy.refuse_in_traced_code("clear_tuning_table")
    policy.change(_loaded.clear)


def active(platform: Platform) -> Active:
    """Give the table of a device: the loaded one, else the environment's, else the shipped one.

    Raises:
        TuningTableError: the one that the environment names is refused.
    """
    name = device_name(platform)
    found = _active.get(name)
    if found is None:
        made_in = policy.generation
        found = _find(name)
        policy.remember(_active, name, made_in, found)
    return found


def _find(device: str) -> Active:
    table = _loaded.get(device)
    if table is None:
        named = policy.env().tuning_table
        if named == NONE:
            return Active(None, None)
        if named is not None:
            table = _of_environment(named, device)
            return Active(table, None)
    if table is None:
        path = SHIPPED / f"{slug(device)}.json"
        if not path.exists():
            return Active(None, None)
        table = read(path)
    why = table.refusal([device])
    return Active(table if why is None else None, why and f"{table.path.name} is of {why}")


def _of_environment(path: str, device: str) -> Table | None:
    table = read(path)
    devices = [device] if table.device == device else devices_here()
    why = table.refusal(devices)
    if why is not None:
        raise TuningTableError(f"TORCH_OPS_TUNING_TABLE: {_refused(table.path, f'it is of {why}')}")
    return table if table.device == device else None


def slug(device: str) -> str:
    """Name the file of a device's shipped table: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def decides(op: str, platform: Platform) -> bool:
    """Whether the device's table has rows of an op."""
    table = active(platform).table
    return table is not None and op in table.rows


def row_of(op: str, platform: Platform, args: Sequence[Any]) -> Row | None:
    """Give the row that speaks for a call, None where none does."""
    from torch_ops.declarations import catalogue

    table = active(platform).table
    rows = table.rows.get(op) if table is not None else None
    declaration = catalogue().get(op)
    if not rows or declaration is None:
        return None
    return rows.get(buckets.bucket(declaration, args))


def rows_of(op: str, platform: Platform) -> list[Row]:
    """Give all rows of an op in the device's table."""
    table = active(platform).table
    return [] if table is None else list(table.rows.get(op, {}).values())


def state(op: str, platform: Platform) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    """Give what the device's table decides of an op; empty where it says nothing."""
    table = active(platform).table
    return () if table is None else table.orders(op)


def digest() -> str:
    """Digest of every table that may decide in this process; empty where there is none."""
    parts = [table.digest for table in _loaded.values()]
    named = policy.env().tuning_table
    if named is None:
        parts += [read(path).digest for path in SHIPPED.glob("*.json")]
    elif named != NONE:
        parts.append(read(named).digest)
    return ".".join(sorted(parts))
