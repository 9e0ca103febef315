"""Run Triton's ops of experts in its interpreter; one JSON object: check -> what broke."""

from __future__ import annotations

from . import workers
from .rows_interpreted import LAYERS, specs

OPS = (
    "topk_softmax",
    "moe_align_block_size",
    "fused_experts",
)
DTYPES = {
    "topk_softmax": ("float16",),
    "moe_align_block_size": ("int32",),
    "fused_experts": ("float16",),
}
STEPS = {
    ("topk_softmax", "layouts"): 3,
    ("moe_align_block_size", "layouts"): 7,
    ("moe_align_block_size", "classes"): 5,
    ("fused_experts", "layouts"): 5,
}
"""Of the examples of a check every n-th is run: the interpreter takes 0.2 to 2 s for one."""
PARTS = ("layouts", "zero", "classes")


def checks() -> list[str]:
    """Name everything that is checked."""
    return [f"{op} {dtype} {part}" for op in OPS for dtype in DTYPES[op] for part in PARTS]


def run(check: str) -> None:
    """Run one check; raises what it finds."""
    from torch_ops.declarations import catalogue
    from torch_ops.testing.examine import Examiner, Tally
    from torch_ops.testing.proof import proof_of
    from torch_ops.testing.registered import registered

    op, dtype, part = check.split()
    subject, tally = registered(op, "triton"), Tally()
    contract = subject.under(catalogue()[op].contract)
    examine = Examiner(subject, proof_of(op), contract, only=LAYERS)
    for spec in specs(op, dtype, part)[:: STEPS.get((op, part), 1)]:
        examine(spec, tally, with_laws=part == "layouts")
    if tally.refused or not tally.executed:
        raise AssertionError(f"executed {tally.executed}, refused {dict(tally.refused)}")


if __name__ == "__main__":
    workers.work(checks(), run)
