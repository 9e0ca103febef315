"""Which calls are measured: legal ones of each model, one for each bucket; and files of sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from torch_ops import TorchOpsError, buckets
from torch_ops.declarations import catalogue
from torch_ops.testing.arguments import build
from torch_ops.testing.proof import proof_names, proof_of
from torch_ops.testing.spec import Spec
from torch_ops.tuner import shapes
from torch_ops.tuner.models import MODELS

SMALL, LARGE = 1 << 12, 1 << 34


@pytest.mark.parametrize("op", proof_names())
def test_a_model_has_legal_calls_of_every_op_it_runs(op: str) -> None:
    proof, declaration = proof_of(op), catalogue()[op]
    names = [str(dtype).removeprefix("torch.") for dtype in declaration.dtypes]
    dtype = next(n for n in ("bfloat16", *names) if shapes.example(op, n) is not None)
    base = shapes.example(op, dtype)
    assert base is not None
    for name, model in MODELS.items():
        found = shapes.one_each(proof, shapes.of_model(op, dtype, name), LARGE)
        lacks = any(n in base.dim and not getattr(model, n) for n in ("experts", "latent"))
        assert (not found) if lacks else len(found) > 1, f"no size of {list(base.dim)} is a model's"
        for spec in found.values():
            declaration.checker(*shapes.zeros(proof, spec, "meta"))


def test_sizes_are_those_of_the_model() -> None:
    specs = shapes.of_model("apply_rope", "bfloat16", "llama3-70b")
    assert [spec.dim["tokens"] for spec in specs] == [1 << power for power in range(15)]
    assert {(s.dim["heads"], s.dim["kv_heads"], s.dim["head_dim"]) for s in specs} == {(64, 8, 128)}
    norms = shapes.of_model("rms_norm", "bfloat16", "deepseek-v3")
    assert {spec.dim["hidden"] for spec in norms} == {7168, 1536, 512}
    windows = shapes.of_model("paged_decode", "bfloat16", "gemma3")
    assert {spec.param["window_left"] for spec in windows} == {-1, 1023}
    assert {spec.dim["qo"] for spec in windows} == {1}


def test_products_have_the_sizes_of_a_layer() -> None:
    assert MODELS["llama3-8b"].products == (
        (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
    )  # fmt: skip


@pytest.mark.parametrize("op", ["rms_norm", "varlen_attention", "append_paged_kv_"])
def test_the_bucket_of_a_spec_is_that_of_its_call(op: str) -> None:
    proof = proof_of(op)
    for spec in proof.small_named("float32")[:3]:
        args = tuple(build(spec).values())
        assert shapes.bucket_of(proof, spec) == buckets.bucket(catalogue()[op], args)


def test_one_call_a_bucket_and_none_over_the_limit() -> None:
    proof = proof_of("rms_norm")
    base = shapes.example("rms_norm", "float32")
    assert base is not None
    specs = [shapes.altered(base, {"tokens": n, "hidden": 64}, {}) for n in (3, 4, 5, 64, 65)]
    found = shapes.one_each(proof, specs, SMALL)
    assert [spec.dim["tokens"] for spec in found.values()] == [3, 5, 64]
    assert all(math.prod(proof.shapes(spec)["x"]) <= SMALL for spec in found.values())


def test_lengths_and_indices_follow_the_sizes() -> None:
    base = shapes.example("varlen_attention", "float32")
    assert base is not None
    other = shapes.altered(base, {"qo": 7, "kv": 9}, {"is_causal": False})
    assert (other.param["max_qo_len"], other.param["max_kv_len"]) == (7, 9)
    assert other.param["is_causal"] is False


def read(tmp_path: Path, data: object, op: str = "rms_norm") -> list[Spec]:
    path = tmp_path / "shapes.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return shapes.of_file(path, op, "float32")


def test_a_file_of_sizes(tmp_path: Path) -> None:
    data = {"rms_norm": [{"tokens": 3, "hidden": 64}, {"tokens": 5, "eps": 1e-5}]}
    first, second = read(tmp_path, data)
    assert first.dim == {"tokens": 3, "hidden": 64}
    assert (second.dim["tokens"], second.param["eps"]) == (5, 1e-5)
    assert read(tmp_path, data, "layer_norm") == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", r"shapes.json can't be read: JSONDecodeError"),
        ([], r"accepted is an object of lists of objects"),
        ({"rms_norm": [3]}, r"accepted is an object of lists of objects"),
        ({"rms_norm": 3}, r"accepted is an object of lists of objects"),
        ({"rms_nrom": []}, r"op 'rms_nrom' isn't declared. Did you mean 'rms_norm'"),
        ({"rms_norm": [{"token": 3}]}, r"no size or number 'token' .* Did you mean 'tokens'"),
        ({"rms_norm": [{"tokens": 0}]}, r"sizes \{'tokens': 0\} \(accepted: ints over 0\)"),
    ],
)
def test_files_that_are_refused(data: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(TorchOpsError, match=message):
        read(tmp_path, data)


def test_a_model_that_is_not_known() -> None:
    with pytest.raises(TorchOpsError, match=r"'llama3-8' are neither.* Did you mean 'llama3-8b'"):
        shapes.of_model("rms_norm", "float32", "llama3-8")
