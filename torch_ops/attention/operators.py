"""The operators of layers: for dense calls, and for calls whose metadata was planned.

Which layer calls, and what its model runs, are sizes of empty tensors: inputs of a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import custom_op

from torch_ops import checks, dynamo, foresight, inlined, policy, runtime, tracing
from torch_ops.attention import group, metadata
from torch_ops.attention.choice import LayerRules
from torch_ops.attention.metadata import AttentionMetadata, Tables
from torch_ops.attention.phases import at
from torch_ops.attention.prepared import Place
from torch_ops.backend import Backend
from torch_ops.declarations import _attention, _paged, _ragged
from torch_ops.errors import DeclarationError, NoBackwardError, TorchOpsError
from torch_ops.transforms import any_tangent

__all__ = ["run_layer", "run_planned"]

_log = logging.getLogger(__name__)
_forward_ad = torch.autograd.forward_ad


def _check(q: Tensor, k: Tensor, v: Tensor, rules: LayerRules | None) -> None:
    _attention.check("attention", q, k, v, None, -1, 0.0)
    if rules is not None:
        _check_heads(rules, (q.shape[2], k.shape[2], q.shape[3], v.shape[3]))


def _check_heads(rules: LayerRules, received: tuple[int, ...]) -> None:
    spec = rules.spec
    wanted = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim)
    if received != wanted:
        raise ValueError(
            f"Attention: arguments 'q', 'k', 'v' have (heads, kv heads, head_dim, v head_dim) "
            f"{received} (accepted: {wanted}, as the layer was built)"
        )


def _kernel(q: Tensor, k: Tensor, v: Tensor, slot: Tensor, route: Tensor) -> Tensor:
    _refuse_grad(q, k, v)
    cache, override = group.find(slot, route)
    _check(q, k, v, cache.rules)
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape)  # there is nothing to attend
    return _as_promised(cache.run(override, q, k, v), q)


def _as_promised(out: Tensor, q: Tensor) -> Tensor:
    """Give a backend's result as the fake does, on which compiled code relies."""
    if not isinstance(out, Tensor) or out.dtype is not q.dtype or out.shape != q.shape:
        raise DeclarationError(
            f"Attention: the backend's run returned {_shown(out)} (accepted: {_shown(q)}, as 'q')"
        )
    return out if out.is_contiguous() else out.contiguous()


def _shown(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} {list(value.shape)}"


def _fake(q: Tensor, k: Tensor, v: Tensor, slot: Tensor, route: Tensor) -> Tensor:
    _refuse_grad(q, k, v)
    _check(q, k, v, None)
    _traced()
    return q.new_empty(q.shape)


def _refuse_grad(q: Tensor, k: Tensor, v: Tensor) -> None:
    if torch._C.is_grad_enabled() and torch._C._any_requires_grad(q, k, v):
        wanted, accepted = "requires grad", "grad, or calls under torch.no_grad() or "
        accepted += "torch.inference_mode()"
    elif _forward_ad._current_level >= 0 and any_tangent((q, k, v)):
        wanted, accepted = "has a tangent", "tangents of forward mode"
    else:
        return
    raise NoBackwardError(
        f"Attention: an input {wanted} and layers have no backward (accepted: inputs without "
        f"{accepted}); torch_ops.ops.attention has one",
        op="attention",
    )


def _traced() -> None:
    if torch.compiler.is_exporting():  # asked here: traced code is told so by torch 2.11 always
        raise TorchOpsError(
            "Attention can't be exported: which kernel runs is known to this process alone. "
            "Call torch.ops.torch_ops.attention in code that is exported"
        )
    dynamo.tag_caches(runtime.fingerprint)
    runtime.depend("attention layers", _chosen)
    lacking = dynamo.read_kept_sizes()
    if lacking is not None:
        _log.info("frames of layers ask for what names them as for any size: %s", lacking)
    inlined.dissolve()  # of other ops in the graph; layers are counted in it


def _chosen() -> tuple[Backend | None, frozenset[str]]:
    """What a policy says of layers: the backend, and what kernels have to promise."""
    scope = policy.current_scope()
    return policy.choose("attention", scope).backend, frozenset(policy.required(scope))


def _check_planned(q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> None:
    """Refuse tensors that don't fit together."""
    qo_indptr, kv_indptr, kv_indices, kv_last_page_len, queries, keys = tables
    if kv_indices is None or kv_last_page_len is None:
        bounds = qo_indptr, kv_indptr, queries, keys
        _ragged.check_packed("attention", q, k, v, *bounds, None, -1, 0.0)
        return
    checks.float_dtype("attention", "q", q)
    checks.rank("attention", "q", q, 3, "[T, H, D]")
    batch, table = qo_indptr.shape[0] - 1, (kv_indptr, kv_indices, kv_last_page_len)
    _paged.check("attention", q, k, v, batch, *table, None, -1, 0.0)
    if tables.decodes and q.shape[0] != batch:
        checks.refuse("attention", "q", f"of {q.shape[0]} rows", f"{batch}, one for each sequence")


def _check_layer(
    q: Tensor, k: Tensor, v: Tensor, rules: LayerRules, step: AttentionMetadata
) -> None:
    """Refuse tensors of other heads than the layer's, or smaller than what was planned."""
    _check_heads(rules, (q.shape[1], k.shape[-2], q.shape[2], v.shape[-1]))
    counts = [("q", q, sum(step.query_lens))]
    if step.kind == "ragged":
        counts.append(("k", k, sum(step.kv_lens)))
    for name, tensor, planned in counts:
        if tensor.shape[0] < planned:
            raise ValueError(
                f"Attention: argument {name!r} has {tensor.shape[0]} rows (accepted: at least "
                f"{planned}, as planned)"
            )
    if step.kind == "paged" and k.shape[:2] != step.pool:
        raise ValueError(
            f"Attention: argument 'k' has (pages, page_size) {tuple(k.shape[:2])} (accepted: "
            f"{step.pool}, as planned)"
        )


def _planned_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor | None,
    kv_last_page_len: Tensor | None,
    step: Tensor,
    slot: Tensor,
    route: Tensor,
) -> Tensor:
    _refuse_grad(q, k, v)
    cache, override = group.find(slot, route)
    planned = metadata.find(step)
    tables = Tables(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, *metadata.most(step))
    call = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        cache.slot, qo_indptr.shape,
    )  # fmt: skip
    if call not in planned.judged:
        _check_planned(q, k, v, tables)
        _check_layer(q, k, v, cache.rules, planned)
        planned.judged.add(call)
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape)
    return _as_promised(cache.run_planned(override, q, k, v, tables, planned), q)


def _planned_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor | None,
    kv_last_page_len: Tensor | None,
    step: Tensor,
    slot: Tensor,
    route: Tensor,
) -> Tensor:
    _refuse_grad(q, k, v)
    tables = Tables(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, *metadata.most(step))
    _check_planned(q, k, v, tables)
    _traced()
    return q.new_empty(q.shape)


def _foresee(q: Tensor, k: Tensor, v: Tensor, slot: Tensor, route: Tensor) -> tracing.Way:
    cache, override = group.find(slot, route)
    return cache.foresee(at(override, q.shape[1] == 1), Place(q.device, q.dtype))


def _foresee_planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor | None,
    kv_last_page_len: Tensor | None,
    step: Tensor,
    slot: Tensor,
    route: Tensor,
) -> tracing.Way:
    cache, override = group.find(slot, route)
    tables = Tables(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, *metadata.most(step))
    place = Place(q.device, q.dtype, metadata.find(step).kind)
    return cache.foresee(at(override, tables.decodes), place)


def _register(
    name: str, arguments: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    schema = f"({arguments}, Tensor slot, Tensor route) -> Tensor"
    custom_op(f"{runtime.NAMESPACE}::{name}", kernel, mutates_args=(), schema=schema)
    runtime.install(name, [kernel, kernel], fake, mutates=False)
    found: Callable[..., Tensor] = getattr(torch.ops.torch_ops, name).default
    return found


run_layer = _register("_attention_layer", "Tensor q, Tensor k, Tensor v", _kernel, _fake)
run_planned = _register(
    "_attention_layer_planned",
    "Tensor q, Tensor k, Tensor v, Tensor qo_indptr, Tensor kv_indptr, Tensor? kv_indices, "
    "Tensor? kv_last_page_len, Tensor step",
    _planned_kernel,
    _planned_fake,
)
foresight.told_by(f"{runtime.NAMESPACE}::_attention_layer", "attention", _foresee)
foresight.told_by(f"{runtime.NAMESPACE}::_attention_layer_planned", "attention", _foresee_planned)
