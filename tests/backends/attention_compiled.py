"""Compile what Triton attention launches, for GPUs that aren't there.

Writes one JSON object: check -> what broke. As in `rows_compiled`, calls on CPU tensors are
recorded instead of launched; tile sizes are chosen as on the target.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from . import workers
from .rows_compiled import BACKEND, TARGETS, Launch, compiled, recorded

DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
# Queries, group, and arguments of the op: long and short, packed and not, with and without masks.
CALLS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (300, 4, {"is_causal": True}),
    (3, 4, {"is_causal": True, "window_left": 7}),
    (300, 1, {"logits_soft_cap": 30.0}),
    (50, 1, {"is_causal": True}),
    (300, 2, {"is_causal": True, "window_left": 100, "logits_soft_cap": 30.0}),
)
LONG = "sm_90 bfloat16 64 long"  # other heads of long queries are among the cells
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv"}


def checks(*, every: bool = False) -> list[str]:
    """Name what is compiled: each head_dim for half of the targets, or every cell."""
    names = [
        f"{target} {dtype} {head_dim}"
        for i, target in enumerate(TARGETS)
        for j, head_dim in enumerate(HEAD_DIMS)
        for k, dtype in enumerate(DTYPES)
        if every or ((i + j) % 2 == 0 and (i + j) % len(DTYPES) == k)
    ]
    return [*names, LONG]


def run(check: str) -> None:
    """Compile a call for a target; raises where that makes no machine code that fits it."""
    target, dtype, head_dim = check.split()[:3]
    number = (HEAD_DIMS.index(int(head_dim)) + DTYPES.index(dtype)) % len(CALLS)
    launch = _launch(target, dtype, int(head_dim), CALLS[0 if check == LONG else number])
    made = compiled_gluon(launch) if launch.name == "_attend_long" else compiled(launch, target)
    if made.asm["hsaco" if target.startswith("gfx") else "cubin"][:4] != b"\x7fELF":
        raise AssertionError(f"{check}: no machine code")
    limit = importlib.import_module(f"{BACKEND}._attention").shared_memory(target)
    if made.metadata.shared > limit:
        raise AssertionError(f"{check}: {made.metadata.shared} bytes of shared memory of {limit}")


def _launch(target: str, dtype: str, head_dim: int, call: tuple[int, int, Any]) -> Launch:
    queries, group, arguments = call
    kind = getattr(torch, dtype)
    q = torch.zeros(1, queries, 2 * group, head_dim, dtype=kind)
    k = torch.zeros(1, 400, 2, head_dim, dtype=kind)
    op = importlib.import_module(f"{BACKEND}.attention_with_lse").attention_with_lse
    with _chosen_for(target), recorded() as launches:
        op(q, k, k.clone(), **arguments)
    (launch,) = launches
    return launch


@contextlib.contextmanager
def _chosen_for(target: str) -> Iterator[None]:
    """Choose tile sizes as on a target, on Hopper also the kernel for long queries."""
    ours: Any = importlib.import_module(f"{BACKEND}._attention")
    hopper: Any = importlib.import_module(f"{BACKEND}._attention_hopper")
    kept = ours.config, hopper.gluon_runs, torch.version.hip
    ours.config = lambda _, *rest: kept[0](target, *rest)
    hopper.gluon_runs = lambda _: target == "sm_90"
    torch.version.hip = "6" if target.startswith("gfx") else None
    _forget(ours, hopper)
    try:
        yield
    finally:
        ours.config, hopper.gluon_runs, torch.version.hip = kept
        _forget(ours, hopper)


def _forget(*modules: Any) -> None:
    for module in modules:
        module._variant.cache_clear()
    modules[0]._plan.cache_clear()


def compiled_gluon(launch: Launch) -> Any:
    """Compile a kernel in Gluon, whose matrices are descriptors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, constants, attributes = {}, {}, {}
    parameters = launch.variant._function.params
    for index, (parameter, value) in enumerate(zip(parameters, launch.values, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{_SHORT[str(value.dtype).removeprefix('torch.')]}"
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif hasattr(value, "block_shape"):
            dtype = _SHORT[str(value.base.dtype).removeprefix("torch.")]
            shape = ", ".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{dtype}[{shape}],{value.layout!r}>"
        else:
            signature[parameter.name] = parameter.annotation.removeprefix("gl.")
    types = {"float32": "fp32", "int32": "i32"}
    signature = {name: types.get(kind, kind) for name, kind in signature.items()}
    source = GluonASTSource(launch.variant._function, signature, constants, attributes)
    options = {"num_warps": launch.variant.threads // 32, **launch.variant._options}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    workers.work(checks(every="--every" in sys.argv), run)
