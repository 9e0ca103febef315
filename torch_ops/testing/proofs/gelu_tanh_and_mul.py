"""Proof of gelu_tanh_and_mul: ``y = g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2 * v``."""

from torch.nn import functional

from torch_ops.testing.proofs._gates import gate_proof

proof = gate_proof(
    "gelu_tanh_and_mul",
    lambda g: functional.gelu(g, approximate="tanh"),
    {
        "gelu_erf": functional.gelu,
        "silu": functional.silu,
        "without_cube": lambda g: 0.5 * g * (1 + (0.7978845608028654 * g).tanh()),
    },
)
