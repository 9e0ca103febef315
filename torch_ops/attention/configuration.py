"""A layer's configurations by interned id, and the operator that runs the one named by an input.

The id reaches the operator as a size of an empty tensor, so in a compiled graph it is an input:
a swap costs no recompile, and CUDA graphs are keyed by it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from torch_ops import dynamo, once, policy, runtime, tracing
from torch_ops.attention.backend import AttentionBackend
from torch_ops.attention.choice import LayerRules, MemberChoice, choose_member
from torch_ops.attention.prepared import PreparedAttention, prepare
from torch_ops.backend import Backend
from torch_ops.declarations import _attention
from torch_ops.errors import BackendUnavailableError, CaptureError, NotPreparedError, TorchOpsError
from torch_ops.once import KernelLoadError

__all__ = ["Cache", "Configuration", "run_layer"]

_FIRST_ID = 1009  # 0 and 1 are specialised by PyTorch; small ids would be taken for batch sizes
_ids = itertools.count(_FIRST_ID)
_by_id: weakref.WeakValueDictionary[int, Configuration] = weakref.WeakValueDictionary()
_Key = tuple[AttentionBackend, torch.device, torch.dtype]
_Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class Cache:
    """A layer's prepared implementations by family, device and dtype."""

    def __init__(self, rules: LayerRules) -> None:
        self.rules = rules
        self.seen: set[tuple[torch.device, torch.dtype]] = set()
        self.last: tuple[torch.device, torch.dtype] | None = None
        self._prepared: dict[_Key, PreparedAttention] = {}
        self._judged_in: dict[_Key, int] = {}
        self._lock = threading.RLock()

    def get(
        self, member: AttentionBackend, device: torch.device, dtype: torch.dtype
    ) -> PreparedAttention | None:
        """Give what is prepared, or None."""
        return self._prepared.get((member, device, dtype))

    def prepare(
        self, member: AttentionBackend, device: torch.device, dtype: torch.dtype
    ) -> PreparedAttention:
        """Prepare a family unless it is prepared; a result of another family isn't kept.

        Raises:
            CaptureError: it isn't prepared and a stream is capturing.
            Exception: whatever the backend raises.
        """
        key = (member, device, dtype)
        prepared = self._prepared.get(key)
        if prepared is not None:  # without the lock: another family may be long in the making
            return prepared
        with self._lock:
            prepared = self._prepared.get(key)
            if prepared is None:
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    raise CaptureError(
                        f"Attention backend {member.value!r} is not prepared for {device}, "
                        f"{dtype}, and a stream is capturing; prepare first: "
                        "prepare_attention_backend_override(layer, backend), or run it once"
                    )
                prepared = prepare(member, self.rules.spec, device, dtype)
                if prepared.backend is member:
                    self._prepared[key] = prepared
            return prepared

    def is_ready(self, member: AttentionBackend, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a family is prepared and nothing has changed since it was judged fit."""
        key = (member, device, dtype)
        return key in self._prepared and self._judged_in.get(key) == policy.generation

    def judged(self, key: _Key, generation: int) -> None:
        """Remember that a family was judged fit under a policy's generation."""
        self._judged_in[key] = generation

    def note(self, place: tuple[torch.device, torch.dtype]) -> None:
        """Remember where the layer is called, which need not be where it was moved to."""
        self.seen.add(place)
        self.last = place

    def forget_places(self) -> None:
        """The layer has moved: where it was called says nothing about where it will be."""
        self.seen = set()
        self.last = None

    def held(self, member: AttentionBackend) -> set[_Key]:
        """Keys of what is prepared of a family."""
        with self._lock:
            return {key for key in self._prepared if key[0] is member}

    def keep_only(self, member: AttentionBackend, keys: set[_Key]) -> None:
        """Drop what is prepared of a family but for these keys."""
        with self._lock:
            for key in self.held(member) - keys:
                del self._prepared[key]
                self._judged_in.pop(key, None)


class Configuration:
    """What one layer runs: an override, or whatever the policy chooses for it. Immutable.

    Attributes:
        id: Names it in graphs; never used again for another one.
        override: The family it is overridden with, None where the policy chooses.
        route: The empty tensor that carries the id into the operator.
    """

    def __init__(self, cache: Cache, override: AttentionBackend | None) -> None:
        self.id = next(_ids)
        self.override = override
        self.cache = cache
        with torch.inference_mode(False):  # all routes alike, or graphs would be compiled anew
            self.route = torch.empty(self.id, 0, device="cpu", dtype=torch.float32)
        dynamo.mark_dynamic(self.route, 0)
        self._plans: tuple[int, dict[Any, _Run]] = (-1, {})
        _by_id[self.id] = self

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with what is chosen now for the device and dtype of ``q``."""
        now = policy.generation
        made_in, plans = self._plans
        if made_in != now:
            # One store of both: a plan that is still being made under the old one stays there.
            plans = {}
            self._plans = (now, plans)
        key = (policy.current_scope(), q.device, q.dtype)
        run = plans.get(key)
        if run is None:
            run = plans[key] = self._resolve(q.device, q.dtype)
        return run(q, k, v)

    def _resolve(self, device: torch.device, dtype: torch.dtype) -> _Run:
        scope = policy.current_scope()
        self.cache.note((device, dtype))
        choice = choose_member(self.cache.rules, self.override, scope, device, dtype)
        try:
            prepared = self.cache.prepare(choice.member, device, dtype)
        except KernelLoadError as error:
            if choice.source != "declared":
                raise _refused(choice, f"loading it failed: {error}") from error
            return self._resolve(device, dtype)  # a reason against it now: another one is chosen
        if prepared.backend is not choice.member:
            raise _refused(choice, f"resolved to {prepared.backend.value!r}")
        run = prepared.run if getattr(prepared, "graph_safe", True) else _uncaptured(prepared)
        return _traced(run, choice) if tracing.active() else run


def _refused(choice: MemberChoice, reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"Attention backend {choice.member.value!r}, chosen by {choice.source}, {reason}; "
        "refusing it instead of silently falling back",
        op="attention",
        backend=choice.member.value,
        reasons=(reason,),
    )


def _uncaptured(prepared: PreparedAttention) -> _Run:
    """Refuse to run in a capture what a replay wouldn't run right."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if once.capturing():
            raise CaptureError(
                f"Attention backend {prepared.backend.value!r} can't run in a CUDA graph (its "
                "graph_safe is False), and a stream is capturing; choose another one before the "
                "capture"
            )
        return prepared.run(q, k, v)

    return run


def _traced(run: _Run, choice: MemberChoice) -> _Run:
    def noted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = run(q, k, v)
        tracing.note("attention", choice.member, choice.source, choice.skipped)
        return result

    return noted


def _find(route: Tensor) -> Configuration:
    configuration = _by_id.get(int(route.shape[0]))
    if configuration is None:
        raise NotPreparedError(
            f"Attention: no layer has a configuration with id {int(route.shape[0])}; a compiled "
            "or exported graph is used after its layer was deleted, or in another process"
        )
    return configuration


def _check(q: Tensor, k: Tensor, v: Tensor, rules: LayerRules | None) -> None:
    _attention.check("attention", q, k, v, None, -1, 0.0)
    if rules is not None:
        spec = rules.spec
        wanted = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim)
        received = (q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        if received != wanted:
            raise ValueError(
                f"Attention: arguments 'q', 'k', 'v' have (heads, kv heads, head_dim, v head_dim) "
                f"{received} (accepted: {wanted}, as the layer was built)"
            )


def _kernel(q: Tensor, k: Tensor, v: Tensor, route: Tensor) -> Tensor:
    if torch._C.is_grad_enabled() and torch._C._any_requires_grad(q, k, v):
        raise runtime.refuse_grad("attention")
    configuration = _find(route)
    _check(q, k, v, configuration.cache.rules)
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape)  # there is nothing to attend
    out = configuration.run(q, k, v)
    return out if out.is_contiguous() else out.contiguous()  # what the fake promises


def _fake(q: Tensor, k: Tensor, v: Tensor, route: Tensor) -> Tensor:
    if torch._C.is_grad_enabled() and torch._C._any_requires_grad(q, k, v):
        raise runtime.refuse_grad("attention")
    _check(q, k, v, None)
    if torch.compiler.is_exporting():  # asked here: traced code is told so by torch 2.11 always
        raise TorchOpsError(
            "Attention can't be exported: which kernel runs is known to this process alone. "
            "Call torch.ops.torch_ops.attention in code that is exported"
        )
    dynamo.tag_caches(runtime.fingerprint)
    runtime.depend("attention layers", _chosen)
    return q.new_empty(q.shape)


def _chosen() -> tuple[Backend | None, frozenset[str]]:
    """What a policy says of layers: the backend, and what kernels have to promise."""
    scope = policy.current_scope()
    return policy.choose("attention", scope).backend, frozenset(policy.required(scope))


def _register() -> Callable[..., Tensor]:
    name = "_attention_layer"
    schema = "(Tensor q, Tensor k, Tensor v, Tensor route) -> Tensor"
    custom_op(f"{runtime.NAMESPACE}::{name}", _kernel, mutates_args=(), schema=schema)
    runtime.install(name, [_kernel, _kernel], _fake, mutates=False)
    return torch.ops.torch_ops._attention_layer.default


run_layer = _register()
