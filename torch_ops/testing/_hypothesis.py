"""The one import of hypothesis, with a message that says how to get it."""

try:
    from hypothesis import (
        HealthCheck,
        Phase,
        Verbosity,
        given,
        reject,
        settings,
        strategies,
        target,
    )
    from hypothesis.errors import FlakyFailure, Unsatisfiable
    from hypothesis.strategies import DrawFn, SearchStrategy
except ModuleNotFoundError as error:
    if error.name != "hypothesis":
        raise
    msg = "torch_ops.testing needs hypothesis: pip install 'torch-ops[test]'"
    raise ModuleNotFoundError(msg, name="hypothesis") from error

__all__ = [
    "DrawFn",
    "FlakyFailure",
    "HealthCheck",
    "Phase",
    "SearchStrategy",
    "Unsatisfiable",
    "Verbosity",
    "given",
    "reject",
    "settings",
    "strategies",
    "target",
]
