"""Parts of a call: what the oracle says of them is what it says of the whole call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from torch_ops.contracts import QuantizationContract
from torch_ops.declarations import catalogue
from torch_ops.testing.arguments import build
from torch_ops.testing.compare import ViolationError
from torch_ops.testing.parts import is_whole
from torch_ops.testing.proof import Arguments, proof_names, proof_of
from torch_ops.testing.spec import Spec

from .specs import attention, small

ROWS = [
    op
    for op in proof_names()
    if not op.startswith("attention") and proof_of(op).fill is None and not is_whole(op)
]  # fmt: skip
SEQUENCES = [op for op in proof_names() if "kv_indptr" in proof_of(op).arguments]
CPU = torch.device("cpu")
ATTENTION = [
    {"is_causal": causal, "window_left": window, "queries": queries}
    for causal in (False, True)
    for window in (-1, 5)
    for queries in (1, 9, 24, 40)
]


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small calls, too."""
    from torch_ops.testing import parts

    monkeypatch.setattr(parts, "ROW_ELEMENTS", 100)
    monkeypatch.setattr(parts, "LOGITS", 300)


def _same_as_whole(spec: Spec) -> int:
    from torch_ops.testing.parts import expected_of

    args, proof = build(spec), proof_of(spec.op)
    whole, parts = proof.oracle(args, catalogue()[spec.op].contract), expected_of(proof, args)
    for part in parts:
        for want, got in zip(whole, part.outputs, strict=True):
            exact = part.part.take(want.value)
            torch.testing.assert_close(got.value, exact, rtol=1e-12, atol=1e-12)
            assert (want.bound is None) == (got.bound is None)
            if want.bound is not None and got.bound is not None:
                # A shorter sum has a smaller bound; never a larger one.
                assert bool((got.bound <= part.part.take(want.bound) * (1 + 1e-12)).all())
    return len(parts)


@pytest.mark.parametrize("options", ATTENTION, ids=str)
def test_parts_of_attention_are_exact(options: dict[str, Any]) -> None:
    assert _same_as_whole(attention(**options)) >= 2


@pytest.mark.parametrize(
    "op", [op for op in proof_names() if "kv_indptr" in proof_of(op).arguments]
)
def test_sequences_are_exact(op: str) -> None:
    """Three of them, and of each as many queries as the limit lets through."""
    assert _same_as_whole(small(op, tokens=200)) == 3
    spec = small(op)
    dims = {name: size for name, size in spec.dims if name not in ("qo", "kv")}
    uneven = {"qo0": 9, "qo1": 0, "qo2": 30, "qo3": 1, "kv0": 0, "kv1": 5, "kv2": 33, "kv3": 7}
    assert _same_as_whole(spec.replace(dims=dims | uneven)) == 3


@pytest.mark.parametrize("op", ROWS)
def test_rows_are_exact(op: str) -> None:
    from torch_ops.testing.parts import parts_of

    spec = small(op, tokens=200)
    assert _same_as_whole(spec) == 1
    (part,) = parts_of(op, build(spec))
    assert part.name != "all rows"


def _outputs(args: Arguments) -> tuple[torch.Tensor]:
    return (catalogue()["rms_norm"].reference(*args.values()),)


def test_what_is_wrong_in_a_part_or_not_written_anywhere_is_seen() -> None:
    from torch_ops.testing.parts import check, expected_of, parts_of

    args = build(small("rms_norm", tokens=200))
    expected, (part,) = expected_of(proof_of("rms_norm"), args), parts_of("rms_norm", args)
    (right,) = _outputs(args)
    assert 0 < check("rms_norm", args, (right,), expected) <= 1
    last = right.clone()
    last[-1] *= 1.01
    with pytest.raises(ViolationError, match="of its bound"):
        check("rms_norm", args, (last,), expected)
    outside = set(range(200)) - set(part.take(torch.arange(200)).tolist())
    unwritten = right.clone()
    unwritten[outside.pop(), 0] = torch.nan
    with pytest.raises(ViolationError, match="1 elements are NaN"):
        check("rms_norm", args, (unwritten,), expected)
    with pytest.raises(ViolationError, match=r"received .*float32.*accepted .*bfloat16"):
        check("rms_norm", args, (right.float(),), expected)


def _reads_values(op: str) -> bool:
    """Whether an oracle looks at tables, or at what a scale is a power of."""
    quantizes = isinstance(catalogue()[op].contract, QuantizationContract)
    return quantizes or proof_of(op).fill is not None


@pytest.mark.parametrize("op", [op for op in proof_names() if not _reads_values(op)])
def test_oracles_compute_where_their_tensors_are(op: str) -> None:
    """A tensor made elsewhere raises: on meta as on a GPU."""
    from benchmarks._calls import on_meta

    with torch.device("meta"):
        outputs = proof_of(op).oracle(on_meta(small(op)), catalogue()[op].contract)
    assert {output.value.device.type for output in outputs} == {"meta"}


@pytest.mark.parametrize("op", proof_names())
def test_arguments_are_those_that_proofs_make(op: str) -> None:
    """Also when they are kept from one call to the next, and with gaps between elements."""
    from benchmarks._calls import Maker, copied

    spec = small(op)
    first, operand = spec.operands[0]
    spec = spec.replace(
        operands=spec.operand | {first: dataclasses.replace(operand, layout="row_stride")}
    )
    make, expected = Maker(CPU, 1 << 20), build(spec)
    kept = [make(spec), make(spec)]
    for args in (*kept, copied(kept[0], list(expected))):
        assert list(args) == list(expected)
        for name, want in expected.items():
            if isinstance(want, torch.Tensor):
                assert (args[name].stride(), args[name].dtype) == (want.stride(), want.dtype)
                torch.testing.assert_close(args[name], want, rtol=0, atol=0, equal_nan=True)
            else:
                assert args[name] == want
    assert kept[0][first] is kept[1][first]
    assert copied(kept[0], ())[first] is kept[0][first]
    assert copied(kept[0], [first])[first] is not kept[0][first]
    assert Maker(CPU, 0)(spec)[first] is not kept[0][first]
