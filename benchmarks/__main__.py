"""``python -m benchmarks NAME``: run one benchmark; ``--json`` prints one JSON object."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path


def main() -> int:
    """Run the named benchmark and give the exit code: 1 where a limit is exceeded."""
    names = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)])]
    known = sorted(name for name in names if not name.startswith("_"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=known)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--save", type=Path, help="write the JSON object to this file, too")
    options = parser.parse_args()
    module = importlib.import_module(f"benchmarks.{options.name}")
    report = module.run()
    text = json.dumps(report, indent=2)
    print(text if options.json else module.table(report))
    if options.save:
        options.save.write_text(text + "\n")
    return 0 if report.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
