"""The command ``torch-ops``. Imports typer and rich only when it runs."""

from __future__ import annotations

import sys

__all__ = ["main"]

_EXTRA = ("typer", "rich", "shellingham", "click")


def main(arguments: list[str] | None = None) -> None:
    """Run ``torch-ops`` and exit: 0 done, 1 an error or a red result, 2 wrong usage.

    Args:
        arguments: Command line without the program's name. Default: of this process.

    Raises:
        SystemExit: always, with the exit code.
    """
    try:
        import rich  # noqa: F401  (a terminal needs it later; said at once, and piped or not)

        from torch_ops.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.exit(
            f"torch-ops: the command line needs the package {error.name!r}, which is not "
            "installed: pip install 'torch-ops[cli]'"
        )
    app(args=arguments, prog_name="torch-ops")
