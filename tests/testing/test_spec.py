"""Specs: JSON round trip, and building the same arguments anywhere."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_ops.testing import Operand, Spec, build, proof_of
from torch_ops.testing.draw import FLOATS
from torch_ops.testing.proof import proof_names
from torch_ops.testing.search import covering_rows, floats_of

EXAMPLE = Spec.of(
    "rms_norm",
    {"tokens": 3, "hidden": 5},
    {"x": Operand("float16", "row_stride", "spiky", 0, ((3, "nan"), (7, "-inf")))},
    {"eps": 1e-6},
    seed=9,
)

# Prints a checksum of everything that the Specs on standard input build.
_DIGEST = """
import hashlib, sys, torch
from torch_ops.testing import Spec, build
total = hashlib.sha256()
for line in sys.stdin:
    for name, value in build(Spec.from_json(line)).items():
        if isinstance(value, torch.Tensor):
            plain = torch.empty(value.shape, dtype=value.dtype).copy_(value)
            data = bytes(plain.view(-1).view(torch.uint8).tolist())
            total.update(repr((name, value.stride(), value.storage_offset())).encode() + data)
        else:
            total.update(repr((name, value)).encode())
print(total.hexdigest())
"""


def _content(value: Tensor) -> bytes:
    plain = torch.empty(value.shape, dtype=value.dtype).copy_(value)
    return bytes(plain.view(-1).view(torch.uint8).tolist())


def test_json_round_trip() -> None:
    text = EXAMPLE.to_json()
    assert Spec.from_json(text) == EXAMPLE
    assert hash(Spec.from_json(text)) == hash(EXAMPLE)
    assert "\n" not in text


@pytest.mark.parametrize("op", proof_names())
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_drawn_specs_survive_json(op: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(floats_of(op)))
    spec = data.draw(proof_of(op).draw(dtype, 2**12))
    again = Spec.from_json(spec.to_json())
    assert again == spec
    assert spec.operands[0][1].dtype == dtype


def test_json_with_unknown_fields_is_refused() -> None:
    data = json.loads(EXAMPLE.to_json())
    with pytest.raises(ValueError, match=r"Spec.from_json: text: received fields \['op'\], acc"):
        Spec.from_json('{"op": "rms_norm"}')
    with pytest.raises(ValueError, match="received fields list, accepted"):
        Spec.from_json("[]")
    data["operands"]["x"]["color"] = "red"
    with pytest.raises(ValueError, match=r"operand 'x': received fields .*'color'"):
        Spec.from_json(json.dumps(data))


def test_replace_takes_mappings() -> None:
    changed = EXAMPLE.replace(dims={"tokens": 1, "hidden": 5}, seed=2)
    assert changed.dim == {"tokens": 1, "hidden": 5}
    assert changed.seed == 2
    assert changed.operands == EXAMPLE.operands


def test_build_gives_arguments_in_order() -> None:
    args = build(EXAMPLE)
    assert list(args) == ["x", "weight", "eps"]
    assert args["weight"] is None
    assert args["eps"] == 1e-6
    x = args["x"]
    assert (x.dtype, tuple(x.shape), x.stride(), x.storage_offset()) == (
        torch.float16, (3, 5), (10, 1), 3,
    )  # fmt: skip
    assert x.flatten()[3].isnan()
    assert x.flatten()[7] == -torch.inf
    assert int(x.isfinite().sum()) == 13


def test_content_depends_on_seed_and_name_alone() -> None:
    strided = build(EXAMPLE)["x"]
    plain = EXAMPLE.replace(operands={"x": Operand("float16", "contig", "spiky", 0, ((3, "nan"),))})
    kept = [i for i in range(15) if i not in (3, 7)]
    assert torch.equal(strided.flatten()[kept], build(plain)["x"].flatten()[kept])
    other = build(EXAMPLE.replace(seed=10))["x"]
    assert not torch.equal(strided.flatten()[kept], other.flatten()[kept])


def test_build_is_the_same_in_another_process() -> None:
    specs = [spec for op in proof_names() for spec in covering_rows(op, FLOATS)[::16]]
    script = [sys.executable, "-c", _DIGEST]
    text = "\n".join(spec.to_json() for spec in specs)
    runs = [
        subprocess.run(script, input=text, stdout=subprocess.PIPE, text=True, check=True)
        for _ in range(2)
    ]
    total = hashlib.sha256()
    for spec in specs:
        for name, value in build(spec).items():
            if isinstance(value, Tensor):
                layout = (name, value.stride(), value.storage_offset())
                total.update(repr(layout).encode() + _content(value))
            else:
                total.update(repr((name, value)).encode())
    assert [run.stdout.strip() for run in runs] == [total.hexdigest()] * 2


def test_unknown_regime_and_layout_are_refused() -> None:
    with pytest.raises(ValueError, match="build: regime: received 'odd', accepted"):
        build(EXAMPLE.replace(operands={"x": Operand(regime="odd")}))
    with pytest.raises(ValueError, match="place: layout: received 'odd', accepted"):
        build(EXAMPLE.replace(operands={"x": Operand(layout="odd")}))
    with pytest.raises(ValueError, match=r"'int64_stride' for shape \(3, 5\), which has no such"):
        build(EXAMPLE.replace(operands={"x": Operand(layout="int64_stride")}))
