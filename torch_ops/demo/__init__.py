"""The demo: a real model answers through torch_ops, compiled, its attention swapped on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_ops.demo.progress import Progress
    from torch_ops.demo.report import Report
    from torch_ops.demo.session import Settings

__all__ = ["QUESTION", "run"]

QUESTION = "What is the capital of France?"
_EXPECTED = {QUESTION: "Paris"}


def run(
    question: str = QUESTION,
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Report:
    """Ask the model a question and report how torch_ops served it.

    Args:
        question: What to ask.
        settings: What to swap and how much to measure.
        progress: Where to show progress; default stderr.

    Returns:
        The report; ``str()`` is for people, ``data`` for programs, ``ok`` tells whether all is as
        it should be.

    Raises:
        MissingExtraError: a package is missing; the message says what to install.
    """
    from torch_ops.demo.progress import Progress
    from torch_ops.demo.session import Session, Settings

    session = Session(
        question, _EXPECTED.get(question), settings or Settings(), progress or Progress()
    )
    return session.run()
