"""Proof of gelu_and_mul: ``y = g (1 + erf(g / sqrt 2)) / 2 * v``."""

import torch.nn.functional as F

from torch_ops.testing.proofs._gates import gate_proof

proof = gate_proof(
    "gelu_and_mul",
    F.gelu,
    {
        "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
        "silu": F.silu,
        "swish_1.702": lambda g: g * (1.702 * g).sigmoid(),
    },
)
