"""Proof of gelu_and_mul: ``y = g (1 + erf(g / sqrt 2)) / 2 * v``."""

from torch.nn import functional

from torch_ops.testing.proofs._gates import gate_proof

proof = gate_proof(
    "gelu_and_mul",
    functional.gelu,
    {
        "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
        "silu": functional.silu,
        "swish_1.702": lambda g: g * (1.702 * g).sigmoid(),
    },
)
