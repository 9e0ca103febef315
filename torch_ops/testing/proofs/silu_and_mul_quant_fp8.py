"""Proof of silu_and_mul_quant_fp8."""

from torch.nn import functional

from torch_ops.declarations import catalogue
from torch_ops.testing.proof import Proof
from torch_ops.testing.proofs import _gates
from torch_ops.testing.proofs._fused_quantization import fused_oracle, laws, mutants
from torch_ops.testing.proofs._gate_faults import gate

OP, BEFORE = "silu_and_mul_quant_fp8", "silu_and_mul"

proof = Proof(
    op=OP,
    arguments=("x",),
    shapes=_gates.shapes,
    draw=_gates.strategy(OP),
    axes=_gates.AXES,
    row=_gates.row(OP),
    zero=_gates.zero(OP),
    classes=_gates.classes(OP),
    named=_gates.named(OP),
    oracle=fused_oracle(BEFORE, _gates.oracle),
    laws=laws(BEFORE, ("x",), odd=False),
    mutants=mutants(
        catalogue()[BEFORE].reference,
        gate(functional.gelu),
        gate(functional.silu, finish=lambda y, _: y),
        (0,),
        odd=False,
    ),
    cost=4,
)
