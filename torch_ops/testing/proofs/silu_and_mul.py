"""Proof of silu_and_mul: ``y = g / (1 + exp(-g)) * v``."""

from torch.nn import functional

from torch_ops.testing.proofs._gates import gate_proof

proof = gate_proof(
    "silu_and_mul",
    functional.silu,
    {
        "gelu": functional.gelu,
        "sigmoid": lambda g: g.sigmoid(),
        "relu": functional.relu,
        "swish_1.702": lambda g: g * (1.702 * g).sigmoid(),
    },
)
