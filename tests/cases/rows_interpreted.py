"""Try the scenarios in Triton's interpreter; writes one JSON object: scenario -> what broke.

A program of its own, since TRITON_INTERPRET has to be set before Triton is imported.
"""

from __future__ import annotations

import json
import sys
import traceback

import torch

from tests.backends import workers

from .kernels import FP32, HALF, RefusedError, of_backend
from .scenarios import SCENARIOS, Scenario

__all__ = ["tried"]


def tried() -> list[Scenario]:
    """Give the scenarios of dtypes that the interpreter computes as a GPU does."""
    return [s for s in SCENARIOS if s.dtype in (HALF, FP32) and "fp8" not in s.op]


def main() -> None:
    """Try all of them."""
    workers.quicken()
    kernels = of_backend("triton", torch.device("cpu"))
    results: dict[str, str | None] = {}
    for scenario in tried():
        try:
            scenario(kernels)
            results[str(scenario)] = None
        except RefusedError as error:
            results[str(scenario)] = f"refused: {error}"
        except Exception:  # reported by the test of this name
            results[str(scenario)] = traceback.format_exc()
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
