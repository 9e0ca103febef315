"""Which calls are measured: Specs of a model's sizes, or of a file, one for each bucket.

An op's first named example says how its calls look; its sizes are exchanged by name. Nothing else
is known of ops here.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_ops import buckets
from torch_ops.declarations import catalogue
from torch_ops.errors import TorchOpsError, listing, nearest
from torch_ops.testing.proof import Proof, proof_of
from torch_ops.testing.spec import Operand, Scalar, Spec
from torch_ops.tuner.models import MODELS, Model

__all__ = ["of_file", "of_model", "one_each", "zeros"]

TOKENS = tuple(1 << power for power in range(15))
BATCHES = tuple(1 << power for power in range(9))
CONTEXTS = (1024, 4096, 16384)
PROMPTS = (512, 2048, 8192)
COUNTS = ("tokens", "batch", "rows")
QUERIES, KEYS = ("qo", "queries"), ("kv", "keys")
Sizes = dict[str, int]


def of_model(op: str, dtype: str, name: str) -> list[Spec]:
    """Give a model's calls of an op; none where the model has no such layers.

    Raises:
        TorchOpsError: there is no such model.
    """
    model = MODELS.get(name)
    if model is None:
        raise TorchOpsError(
            f"shapes {name!r} are neither a file nor a model (accepted: a file, or "
            f"{listing(list(MODELS))}).{nearest(name, MODELS)}"
        )
    base = example(op, dtype)
    if base is None or any(n in base.dim and not getattr(model, n) for n in ("experts", "latent")):
        return []
    return [
        altered(base, sizes, params)
        for sizes in _sizes(base, model)
        for params in _params(base, model)
    ]


def example(op: str, dtype: str) -> Spec | None:
    """Give an op's first named call in a dtype, None where it has none."""
    legal = getattr(torch, dtype) in catalogue()[op].dtypes
    return next(iter(proof_of(op).named(dtype).values()), None) if legal else None


def _sizes(base: Spec, model: Model) -> Iterator[Sizes]:
    """Give a model's sizes of a call, with every number of tokens or of sequences."""
    if set("mnk") <= base.dim.keys():
        for (n, k), m in itertools.product(model.products, TOKENS):
            yield {"m": m, "n": n, "k": k}
        return
    fixed = {name: model.sizes[name] for name in base.dim if name in model.sizes}
    for values in itertools.product(*fixed.values()):
        for counts in _counts(base):
            yield dict(zip(fixed, values, strict=True)) | counts


def _counts(base: Spec) -> Iterator[Sizes]:
    queries = next((name for name in QUERIES if name in base.dim), None)
    keys = next((name for name in KEYS if name in base.dim), None)
    if queries is None or keys is None:
        count = next((name for name in COUNTS if name in base.dim), None)
        yield from ({count: tokens} for tokens in TOKENS if count is not None)
        return
    for batch, context in itertools.product(BATCHES, CONTEXTS):
        yield {"batch": batch, queries: 1, keys: context}
    if base.dim[queries] > 1:
        for prompt in PROMPTS:
            yield {"batch": 1, queries: prompt, keys: prompt}


def _params(base: Spec, model: Model) -> Iterator[dict[str, Scalar]]:
    known = {"k": model.top_k, "num_experts": model.experts} if model.experts else {}
    params: dict[str, Scalar] = {n: value for n, value in known.items() if n in base.param}
    yield params
    if model.window and "window_left" in base.param:
        yield params | {"window_left": model.window - 1}


def altered(base: Spec, sizes: Sizes, params: Mapping[str, Scalar]) -> Spec:
    """Exchange sizes and numbers, and what follows from the sizes."""
    dims = base.dim | sizes
    follow: dict[str, Scalar] = {
        name: dims[name[4:-4]]
        for name in base.param
        if name.startswith("max_") and name.endswith("_len") and name[4:-4] in dims
    }
    operands = {name: _operand(operand, base.dim, dims) for name, operand in base.operands}
    return base.replace(dims=dims, params=base.param | follow | dict(params), operands=operands)


def _operand(operand: Operand, before: Sizes, dims: Sizes) -> Operand:
    """Indices below a size are below the new size."""
    for name in ("experts", "vocab", "pages"):
        if operand.high and operand.high == before.get(name):
            return Operand(operand.dtype, operand.layout, operand.regime, dims[name])
    return operand


def of_file(path: Path, op: str, dtype: str) -> list[Spec]:
    """Read calls: ``{"rms_norm": [{"tokens": 16, "hidden": 4096}, ...], ...}``.

    Sizes and numbers that an entry doesn't name are those of the op's first named example.

    Raises:
        TorchOpsError: the file can't be read, or names an op, a size or a number that isn't there.
    """
    entries = read(path).get(op, [])
    base = example(op, dtype)
    if base is None:
        return []
    found = []
    for entry in entries:
        unknown = [name for name in entry if name not in (*base.dim, *base.param)]
        if unknown:
            raise TorchOpsError(
                f"{path}: op {op!r} has no size or number {unknown[0]!r} (accepted: "
                f"{listing([*base.dim, *base.param])}).{nearest(unknown[0], base.dim)}"
            )
        sizes = {name: value for name, value in entry.items() if name in base.dim}
        wrong = {n: v for n, v in sizes.items() if type(v) is not int or v < 1}
        if wrong:
            raise TorchOpsError(f"{path}: op {op!r}: sizes {wrong} (accepted: ints over 0)")
        found.append(altered(base, sizes, {n: v for n, v in entry.items() if n in base.param}))
    return found


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Read a file of shapes: the entries by op.

    Raises:
        TorchOpsError: it can't be read, or has another form; names what is accepted.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TorchOpsError(f"{path} can't be read: {type(error).__name__}: {error}") from error
    lists = [*data.values()] if isinstance(data, dict) else [None]
    if not all(isinstance(e, list) and all(isinstance(one, dict) for one in e) for e in lists):
        raise TorchOpsError(f"{path}: accepted is an object of lists of objects, by op")
    unknown = [op for op in data if op not in catalogue()]
    if unknown:
        raise TorchOpsError(
            f"{path}: op {unknown[0]!r} isn't declared.{nearest(unknown[0], catalogue())}"
        )
    return dict(data)


def one_each(proof: Proof, specs: Sequence[Spec], limit: int) -> dict[str, Spec]:
    """Give the first Spec of every bucket, but none with a tensor over a limit of elements."""
    found: dict[str, Spec] = {}
    for spec in specs:
        shapes = proof.shapes(spec)
        if max(math.prod(shapes[name]) for name in spec.operand) <= limit:
            found.setdefault(bucket_of(proof, spec), spec)
    return found


def bucket_of(proof: Proof, spec: Spec) -> str:
    """Name the bucket of a Spec's call, without making its tensors."""
    return buckets.bucket(catalogue()[spec.op], zeros(proof, spec, "meta"))


def zeros(proof: Proof, spec: Spec, device: str) -> tuple[Any, ...]:
    """Make a Spec's call without its contents; of layouts, columns for rows alone are kept."""
    shapes, operands, params = proof.shapes(spec), spec.operand, spec.param
    return tuple(
        _zeros(shapes[name], operands[name], device) if name in operands else _value(params, name)
        for name in proof.arguments
    )


def _zeros(shape: tuple[int, ...], operand: Operand, device: str) -> torch.Tensor:
    dtype = getattr(torch, operand.dtype)
    if operand.layout == "transposed":
        *lead, rows, columns = shape
        return torch.zeros((*lead, columns, rows), dtype=dtype, device=device).transpose(-1, -2)
    return torch.zeros(shape, dtype=dtype, device=device)


def _value(params: Mapping[str, Scalar], name: str) -> object:
    """A number, or a dtype, of which a Spec holds the name."""
    value = params.get(name)
    return getattr(torch, value) if isinstance(value, str) else value
