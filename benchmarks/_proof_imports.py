"""What the process imports whose forks prove kernels: all that proving needs, once."""

from __future__ import annotations

import importlib
import os

# As many processes as cores: each compiles in itself.
os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Inductor asks whether there is a GPU when it is imported; asked otherwise, no fork could use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
for _module in (
    "benchmarks._proof_job", "torch._inductor.codegen.triton", "torch.testing._internal.optests",
):  # fmt: skip
    importlib.import_module(_module)
