"""``python -m benchmarks NAME``: run one benchmark; ``--json`` prints one JSON object.

A benchmark is a module with ``run`` and ``table``. It may define ``arguments(parser)``, whose
options ``run`` then takes by name, ``merged(old, new)``, which adds a report to the one that is
saved already, and ``save(report, path)``, which writes more files beside the JSON object and gives
their names.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named benchmark and give the exit code: 1 where a limit is exceeded."""
    words = list(sys.argv[1:] if argv is None else argv)
    names = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)])]
    known = sorted(name for name in names if not name.startswith("_"))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=known)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--save", type=Path, help="write the JSON object to this file, too")
    module: Any = None
    if words and words[0] in known:
        module = importlib.import_module(f"benchmarks.{words[0]}")
        if hasattr(module, "arguments"):
            module.arguments(parser)
    options = vars(parser.parse_args(words))
    name, as_json, path = (options.pop(key) for key in ("name", "json", "save"))
    module = module or importlib.import_module(f"benchmarks.{name}")
    today = dt.datetime.now(dt.UTC).date().isoformat()
    origin = {"command": " ".join(["python -m benchmarks", *words]), "date": today}
    report = {**module.run(**options), **origin}
    text = json.dumps(report, indent=2)
    print(text if as_json else module.table(report))
    if path:
        _save(module, report, text, path)
    return 0 if report.get("ok", True) else 1


def _save(module: Any, report: dict[str, Any], text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if hasattr(module, "merged"):
        old = json.loads(path.read_text()) if path.exists() else {}
        text = json.dumps(module.merged(old, report), indent=1)
    path.write_text(text + "\n")
    for written in getattr(module, "save", lambda *_: ())(report, path):
        print(f"wrote {written}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
