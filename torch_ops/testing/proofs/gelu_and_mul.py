"""Proof of gelu_and_mul: ``y = g (1 + erf(g / sqrt 2)) / 2 * v``."""

import torch
from torch import Tensor
from torch.nn import functional

from torch_ops.testing.proofs._gates import gate_proof


def _gelu(g: Tensor) -> Tensor:
    """PyTorch's own errs on CPUs with AVX-512, and so found faults there that nobody planted."""
    return g / 2 * torch.erfc(g * -(0.5**0.5))


proof = gate_proof(
    "gelu_and_mul",
    _gelu,
    {
        "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
        "silu": functional.silu,
        "swish_1.702": lambda g: g * (1.702 * g).sigmoid(),
    },
)
