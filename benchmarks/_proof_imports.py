"""What the process imports whose forks prove kernels: all that proving needs, once."""

from __future__ import annotations

import importlib
import os

# As many processes as cores: each compiles in itself.
os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
for _module in (
    "benchmarks._proof_job", "torch.testing._internal.optests", "torch._inductor.compile_fx",
):  # fmt: skip
    importlib.import_module(_module)
