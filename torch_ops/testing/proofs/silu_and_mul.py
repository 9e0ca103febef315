"""Proof of silu_and_mul: ``y = g / (1 + exp(-g)) * v``."""

import torch.nn.functional as F

from torch_ops.testing.proofs._gates import gate_proof

proof = gate_proof(
    "silu_and_mul",
    F.silu,
    {
        "gelu": F.gelu,
        "sigmoid": lambda g: g.sigmoid(),
        "relu": F.relu,
        "swish_1.702": lambda g: g * (1.702 * g).sigmoid(),
    },
)
