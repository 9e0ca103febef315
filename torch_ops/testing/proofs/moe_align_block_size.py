"""Proof of moe_align_block_size: integers, so that everything is known exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops.declarations._experts import capacity
from torch_ops.testing import draw as pieces
from torch_ops.testing._hypothesis import DrawFn
from torch_ops.testing._hypothesis import strategies as st
from torch_ops.testing.arithmetic import contract_field
from torch_ops.testing.layouts import LAYOUTS
from torch_ops.testing.proof import Arguments, Law, Output, Pair, Proof, Shapes, Trial
from torch_ops.testing.proofs._align_faults import MUTANTS
from torch_ops.testing.spec import Operand, Spec

OP = "moe_align_block_size"
REGIMES = ("index", "first", "last", "counting", "backwards")
NAMES = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
# tokens, k, experts, block_size
DIMS = {
    "one": (1, 1, 1, 1), "few": (4, 1, 1, 16), "odd": (7, 2, 5, 4), "empty": (3, 2, 160, 16),
    "many": (33, 3, 257, 2), "tall": (257, 2, 3, 64), "single": (40, 1, 3, 1),
}  # fmt: skip
SKIPPED = {"none": 0, "some": 1, "all": 2}
# tokens, k, experts; blocks of 64
NAMED = ((1, 8, 128), (128, 8, 128), (8192, 8, 128), (128, 2, 8), (8192, 2, 8))
AXES: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "regime": REGIMES,
    "dims": tuple(DIMS),
    "skipped": tuple(SKIPPED),
}


def shapes(spec: Spec) -> Shapes:
    """Ids ``[T, k]``."""
    return {"ids": (spec.dim["tokens"], spec.dim["k"])}


def fill(spec: Spec, name: str, values: Tensor) -> Tensor:
    """Ids, some or all of which are no expert's."""
    experts, skipped = int(spec.param["num_experts"] or 0), spec.dim["skipped"]
    flat = values.reshape(-1).clone()
    if skipped:
        flat[:: 3 if skipped == 1 else 1] = -1
        flat[1 :: 5 if skipped == 1 else 2] = experts
        flat[4::7] = -7
    return flat.view(values.shape)


def _spec(
    sizes: Sequence[int], layout: str = "contig", regime: str = "index", skipped: int = 0,
    seed: int = 0,
) -> Spec:  # fmt: skip
    tokens, k, experts, block_size = sizes
    dims = {"tokens": tokens, "k": k, "skipped": skipped}
    look = Operand("int32", layout, regime, high=experts)
    params = {"num_experts": experts, "block_size": block_size}
    spec = Spec.of(OP, dims, {"ids": look}, params, seed)
    return pieces.fitted(spec, shapes(spec))


@st.composite
def draw(draw: DrawFn, dtype: str, budget: int) -> Spec:
    """Specs of any number of experts, and ids that are none's."""
    k = draw(st.integers(1, 8))
    sizes = (
        draw(pieces.tokens(min(budget // k, 300))), k, draw(pieces.size(300)),
        draw(st.sampled_from((16, 1, 2, 3, 64, 128))),
    )  # fmt: skip
    shape = (sizes[0], k)
    look = draw(pieces.operand(dtype, shape, REGIMES, high=sizes[2]))
    skipped = draw(st.sampled_from((0, 1, 2)))
    return _spec(sizes, look.layout, look.regime, skipped, draw(pieces.seeds()))


def row(dtype: str, choice: Mapping[str, Any]) -> Spec:
    """A row of the covering array."""
    sizes = list(DIMS[choice["dims"]])
    if choice["layout"] == "int64_stride":
        sizes[0] = 1
    skipped = SKIPPED[choice["skipped"]]
    return _spec(sizes, choice["layout"], choice["regime"], skipped, seed=1)


def zero(dtype: str) -> list[Spec]:
    """No tokens, or no experts for any."""
    return [
        _spec(sizes, layout)
        for sizes in ((0, 2, 5, 4), (3, 0, 5, 4), (0, 1, 1, 1))
        for layout in ("contig", "row_stride")
    ]


def classes(dtype: str) -> list[Spec]:
    """Ids that are no expert's: a part of them, or all."""
    return [_spec(sizes, skipped=skipped) for sizes in DIMS.values() for skipped in (1, 2)]


def named(dtype: str) -> dict[str, Spec]:
    """Layers of models, as ``tokens x k of experts``."""
    return {f"{t}x{k} of {e}": _spec((t, k, e, 64)) for t, k, e in NAMED}


def _sorted(ids: Tensor, num_experts: int, block_size: int) -> tuple[Tensor, Tensor, int]:
    """Expert by expert: what belongs to it, then padding up to a whole block."""
    flat, number = ids.reshape(-1), ids.numel()
    room = capacity(number, num_experts, block_size)
    entries = torch.full((room,), number, dtype=torch.float64)
    owners = torch.full((room // block_size,), -1, dtype=torch.float64)
    used = 0
    for expert in range(num_experts):
        mine = (flat == expert).nonzero().view(-1)
        entries[used : used + len(mine)] = mine.double()
        blocks = (len(mine) + block_size - 1) // block_size
        owners[used // block_size :][:blocks] = expert
        used += blocks * block_size
    return entries, owners, used


def oracle(args: Arguments, contract: Any) -> tuple[Output, ...]:
    """The sorted assignments, the expert of each block and how many entries are used."""
    contract_field(contract, "order", "ascending")
    contract_field(contract, "padding", "number_of_assignments")
    contract_field(contract, "unused_block", "minus_one")
    contract_field(contract, "invalid_id", "left_out")
    entries, owners, used = _sorted(args["ids"], args["num_experts"], args["block_size"])
    total = torch.tensor([used], dtype=torch.float64)
    values = (entries, owners, total)
    return tuple(
        Output(name, value, None, torch.int32) for name, value in zip(NAMES, values, strict=True)
    )


def _valid(trial: Trial) -> tuple[Tensor, Tensor]:
    """The ids in a row, and which of them are experts'."""
    flat = trial.args["ids"].reshape(-1)
    return flat, (flat >= 0) & (flat < trial.args["num_experts"])


def _every_assignment(trial: Trial) -> Sequence[Pair]:
    flat, valid = _valid(trial)
    entries = trial.outputs[0]
    found = entries[(entries >= 0) & (entries < len(flat))].sort().values
    return [Pair("assignments", found.long(), valid.nonzero().view(-1))]


def _one_expert(trial: Trial) -> Sequence[Pair] | None:
    flat, _ = _valid(trial)
    entries, owners, _ = trial.outputs
    if not len(flat):
        return None
    owner = owners.repeat_interleave(trial.args["block_size"])
    real = (entries >= 0) & (entries < len(flat))
    return [Pair("experts of entries", flat[entries[real].long()], owner[real])]


def _ascending(trial: Trial) -> Sequence[Pair]:
    entries, owners, _ = trial.outputs
    owner = owners.repeat_interleave(trial.args["block_size"])
    real = entries != trial.args["ids"].numel()
    entries, owner = entries[real], owner[real]
    rises = (entries[1:] > entries[:-1]) | (owner[1:] != owner[:-1])
    return [Pair("entries of one expert rise", rises, torch.ones_like(rises))]


def _count(trial: Trial) -> Sequence[Pair]:
    flat, valid = _valid(trial)
    size = trial.args["block_size"]
    counts = torch.bincount(flat[valid].long())
    used = ((counts + size - 1) // size * size).sum().view(1)
    return [Pair("entries used", trial.outputs[2].long(), used)]


def _padding(trial: Trial) -> Sequence[Pair]:
    """What is no assignment is the sentinel, and no block behind the last has an expert."""
    flat, valid = _valid(trial)
    entries, owners, used = trial.outputs
    ordered = entries.sort().values
    rest = ordered[int(valid.sum()) :]
    behind = owners[int(used) // trial.args["block_size"] :]
    return [
        Pair("padding", rest, torch.full_like(rest, len(flat))),
        Pair("unused blocks", behind, torch.full_like(behind, -1)),
    ]


def _left_out(trial: Trial) -> Sequence[Pair] | None:
    """Which of the ids that are no expert's stands somewhere is nothing to anyone."""
    ids, experts = trial.args["ids"], trial.args["num_experts"]
    if not ids.numel():
        return None
    some = ids.clone()
    some.view(-1)[::2] = -1
    base = trial.run(ids=some)
    pairs = []
    for other in (experts, experts + 9, -experts, -(2**31)):
        changed = some.clone()
        changed.view(-1)[::2] = other
        got = trial.run(ids=changed)
        pairs += [
            Pair(f"{n}, {other} for -1", a, b) for n, a, b in zip(NAMES, got, base, strict=True)
        ]
    return pairs


def _block_of_one(trial: Trial) -> Sequence[Pair]:
    flat, valid = _valid(trial)
    places = valid.nonzero().view(-1)
    order = places[torch.sort(flat[places], stable=True).indices].int()
    entries, owners, used = trial.run(block_size=1)
    return [
        Pair("entries of blocks of 1", entries[: len(order)], order),
        Pair("experts of blocks of 1", owners[: len(order)], flat[order.long()]),
        Pair("blocks of 1", used.long(), torch.full_like(used, len(order)).long()),
    ]


LAWS = (
    Law("every_assignment", "each assignment to an expert is found once", _every_assignment),
    Law("one_expert", "a block's assignments are of its expert", _one_expert),
    Law("ascending", "those of one expert are in ascending order", _ascending),
    Law("count", "n == sum of counts, each rounded up to blocks", _count),
    Law("padding", "all else is the number of assignments, and -1", _padding),
    Law("left_out", "ids that are no expert's are alike", _left_out),
    Law("block_of_one", "f(ids, B = 1) is a stable sort", _block_of_one),
)

proof = Proof(
    op=OP,
    arguments=("ids", "num_experts", "block_size"),
    shapes=shapes,
    draw=draw,
    axes=AXES,
    row=row,
    zero=zero,
    classes=classes,
    named=named,
    oracle=oracle,
    laws=LAWS,
    mutants=MUTANTS,
    fill=fill,
    cost=8,
)
