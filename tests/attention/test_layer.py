"""The layer itself: what it accepts, what it shows, and how it is copied, moved and stored."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import torch_ops
from torch_ops.attention import (
    Attention,
    AttentionBackend,
    apply_attention_backend_override,
    attention_state,
    group,
    operators,
    override_attention_backend,
    prepare_attention_backend_override,
)

from . import support


@pytest.fixture
def layer() -> Attention:
    return Attention(4, 8, 2, is_causal=True)


def test_geometry_has_defaults() -> None:
    spec = Attention(4, 16).spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 4, 16)
    assert (spec.scale, spec.is_causal) == (0.25, False)
    assert (spec.window_left, spec.logits_soft_cap) == (-1, 0.0)


def test_geometry_is_what_was_given() -> None:
    layer = Attention(
        6, 16, 3, scale=0.5, is_causal=True, window_left=7, logits_soft_cap=30.0, role="cross"
    )
    spec = layer.spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (6, 3, 16)
    assert (spec.scale, spec.is_causal) == (0.5, True)
    assert (spec.window_left, spec.logits_soft_cap) == (7, 30.0)
    assert layer.role == "cross"
    assert hash(spec) == hash(copy.deepcopy(spec))
    with pytest.raises(AttributeError):
        spec.scale = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_heads": 0}, "argument 'num_heads' is 0 (accepted: an int >= 1)"),
        ({"num_heads": 2.0}, "argument 'num_heads' is 2.0 (accepted: an int >= 1)"),
        ({"head_dim": -8}, "argument 'head_dim' is -8 (accepted: an int >= 1)"),
        ({"num_kv_heads": 0}, "argument 'num_kv_heads' is 0 (accepted: an int >= 1)"),
        ({"num_kv_heads": 3}, "argument 'num_kv_heads' is 3 (accepted: a divisor of num_heads 4)"),
        ({"scale": float("nan")}, "argument 'scale' is nan (accepted: a finite number)"),
        ({"scale": float("inf")}, "argument 'scale' is inf (accepted: a finite number)"),
        ({"scale": "1"}, "argument 'scale' is '1' (accepted: a finite number)"),
        ({"window_left": -2}, "argument 'window_left' is -2 (accepted: an int >= -1 of 64 bits)"),
        ({"window_left": 2.5}, "argument 'window_left' is 2.5 (accepted: an int >= -1 of 64 bits)"),
        ({"window_left": 2**63}, f"is {2**63} (accepted: an int >= -1 of 64 bits)"),
        (
            {"logits_soft_cap": -1.0},
            "argument 'logits_soft_cap' is -1.0 (accepted: a finite number >= 0)",
        ),
        (
            {"logits_soft_cap": float("inf")},
            "argument 'logits_soft_cap' is inf (accepted: a finite number >= 0)",
        ),
        (
            {"logits_soft_cap": None},
            "argument 'logits_soft_cap' is None (accepted: a finite number >= 0)",
        ),
        ({"backend": "torch_mth"}, "'torch_mth' is not an AttentionBackend"),
        ({"required_backend": "nope"}, "'nope' is not an AttentionBackend"),
        ({"supported_backends": ["nope"]}, "'nope' is not an AttentionBackend"),
        (
            {"supported_backends": []},
            "argument 'supported_backends' is [] (accepted: None for all, or a collection of at "
            "least one backend)",
        ),
        (
            {"supported_backends": "torch_math"},
            "argument 'supported_backends' is 'torch_math' (accepted: None for all, or a "
            "collection of at least one backend)",
        ),
        (
            {"supported_backends": ["torch_math"], "backend": "torch_flash"},
            "argument 'backend' is 'torch_flash' (accepted: one of supported_backends, "
            "'torch_math')",
        ),
        (
            {"supported_backends": ["torch_math"], "required_backend": "inductor"},
            "argument 'required_backend' is 'inductor' (accepted: one of supported_backends, "
            "'torch_math')",
        ),
        (
            {"backend": "torch_math", "required_backend": "inductor"},
            "argument 'backend' is 'torch_math' (accepted: None or required_backend 'inductor', to "
            "which the layer is pinned)",
        ),
    ],
)
def test_construction_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Attention(**{"num_heads": 4, "head_dim": 8} | options)


def test_backends_are_members_or_values() -> None:
    by_value = Attention(4, 8, supported_backends=["torch_math", "inductor"], backend="inductor")
    by_member = Attention(
        4,
        8,
        supported_backends=(b for b in [AttentionBackend.TORCH_MATH, AttentionBackend.INDUCTOR]),
        backend=AttentionBackend.INDUCTOR,
    )
    assert by_value.backend is by_member.backend is AttentionBackend.INDUCTOR


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda q, k, v: (None, k, v), TypeError, "argument 'q' is a NoneType"),
        (lambda q, k, v: (q, "k", v), TypeError, "argument 'k' is a str (accepted: a torch.Tensor"),
        (lambda q, k, v: (q, k, [1.0]), TypeError, "argument 'v' is a list"),
        (lambda q, k, v: (q[0], k, v), ValueError, "argument 'q' is of shape [3, 4, 8] (accepted:"),
        (lambda q, k, v: (q, k[:1], v[:1]), ValueError, "argument 'k' is of shape [1, 5, 2, 8]"),
        (lambda q, k, v: (q, k, v[:, :4]), ValueError, "argument 'v' is of shape [2, 4, 2, 8]"),
        (lambda q, k, v: (q, k[..., :4], v[..., :4]), ValueError, "argument 'k' is of shape"),
        (
            lambda q, k, v: (q, k, v[..., :4].contiguous()),
            ValueError,
            "(4, 2, 8, 4) (accepted: (4, 2, 8, 8), as the layer was built)",
        ),
        (
            lambda q, k, v: (q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)),
            ValueError,
            "(4, 4, 8, 8) (accepted: (4, 2, 8, 8), as the layer was built)",
        ),
        (
            lambda q, k, v: (q, k.bfloat16(), v),
            TypeError,
            "argument 'k' is torch.bfloat16 (accepted: torch.float32, as 'q')",
        ),
        (lambda q, k, v: (q.int(), k.int(), v.int()), TypeError, "argument 'q' is torch.int32"),
        (lambda q, k, v: (q.cfloat(), k, v), TypeError, "argument 'q' is torch.complex64"),
        (
            lambda q, k, v: (q, k.to("meta"), v),
            ValueError,
            "argument 'k' is on device meta (accepted: cpu, as 'q')",
        ),
    ],
)
def test_calls_refuse(
    layer: Attention,
    change: Callable[[Tensor, Tensor, Tensor], tuple[Any, Any, Any]],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        layer(*change(*support.inputs(layer)))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_refused(layer: Attention, name: str) -> None:
    call = dict(zip("qkv", support.inputs(layer), strict=True))
    call[name].requires_grad_()
    with pytest.raises(torch_ops.NoBackwardError, match="layers have no backward"):
        layer(**call)
    with torch.no_grad():
        assert not layer(**call).requires_grad
    with torch.inference_mode():
        layer(**call)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own
def test_tangents_are_refused(layer: Attention, script: Any) -> None:
    q, k, v = support.inputs(layer)
    apply_attention_backend_override(layer, "scripted_one")  # knows of none, and would lose them
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(torch_ops.NoBackwardError, match="has a tangent and layers have no"):
            layer(dual, k, v)
        assert layer(q, k, v).eq(1).all()


def test_output_is_fresh_and_contiguous(layer: Attention) -> None:
    q, k, v = support.inputs(layer)
    copies = q.clone(), k.clone(), v.clone()
    out = layer(q, k, v)
    assert out.is_contiguous()
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    addresses = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    assert out.untyped_storage().data_ptr() not in addresses
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), copies, strict=True))


def test_meta_inputs_give_meta_outputs(layer: Attention) -> None:
    q, k, v = (x.to("meta") for x in support.inputs(layer))
    out = layer(q, k, v)
    assert out.device.type == "meta"
    assert out.shape == q.shape


def test_repr_shows_geometry_and_choices() -> None:
    assert repr(Attention(4, 16)) == (
        "Attention(num_heads=4, head_dim=16, num_kv_heads=4, is_causal=False)"
    )
    layer = Attention(
        4,
        16,
        2,
        scale=0.5,
        is_causal=True,
        window_left=3,
        logits_soft_cap=30.0,
        backend="inductor",
        role="cross",
    )
    shown = (
        "num_heads=4, head_dim=16, num_kv_heads=2, is_causal=True, scale=0.5, window_left=3, "
        "logits_soft_cap=30.0, role='cross', default=inductor"
    )
    assert layer.extra_repr() == shown
    assert repr(Attention(1, 8, required_backend="torch_math")).endswith("required=torch_math)")
    apply_attention_backend_override(plain := Attention(4, 16), "torch_math")
    assert plain.extra_repr().endswith("is_causal=False, override=torch_math")


def test_backend_is_read_only(layer: Attention) -> None:
    before = layer.backend
    with pytest.raises(AttributeError, match=r"read-only; use .*override_attention_backend"):
        layer.backend = "torch_math"
    assert layer.backend is before


def test_backend_says_what_runs(layer: Attention) -> None:
    inputs = support.inputs(layer)
    for target in ("torch_math", "torch_flash", None):
        apply_attention_backend_override(layer, target)
        with torch_ops.trace() as trace:
            layer(*inputs)
        assert [record.backend for record in trace.records] == [layer.backend]


def test_backend_raises_what_the_call_would_raise() -> None:
    layer = Attention(4, 8, supported_backends=["flashinfer_fa3"])
    text = "op 'attention' has no backend usable on device 'cpu'"
    with pytest.raises(torch_ops.NoBackendError, match=text) as by_property:
        _ = layer.backend
    with pytest.raises(torch_ops.NoBackendError, match=text) as by_call:
        layer(*support.inputs(layer))
    assert str(by_property.value) == str(by_call.value)
    reasons = {c.backend.value: c.reasons for c in by_call.value.candidates}
    assert set(reasons) == {"torch_flash", "torch_math", "inductor"}
    assert all(
        "not among the layer's supported_backends ('flashinfer_fa3')" in why
        for why in reasons.values()
    )


def same(a: Attention, b: Attention) -> bool:
    """Whether two layers give the same, and would run the same."""
    inputs = support.inputs(a)
    alike = a.spec == b.spec and a.role == b.role and a.required_backend is b.required_backend
    return alike and a.backend is b.backend and torch.equal(a(*inputs), b(*inputs))


def _saved(layer: Attention) -> Attention:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, Attention)
    return loaded


COPIES: dict[str, Callable[[Attention], Attention]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": _saved,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("override", [None, "torch_math"])
def test_copies_are_equal_and_independent(how: str, override: str | None) -> None:
    layer = Attention(4, 8, 2, is_causal=True, window_left=2, role="self")
    apply_attention_backend_override(layer, override)
    layer(*support.inputs(layer))
    twin = COPIES[how](layer)
    assert same(layer, twin)
    before = attention_state(layer)
    other = "torch_flash" if override else "torch_math"
    apply_attention_backend_override(twin, other)
    assert attention_state(layer) == before
    assert attention_state(twin) != before
    apply_attention_backend_override(layer, override)
    assert twin.backend == other


@pytest.mark.parametrize("how", COPIES)
def test_copies_keep_pins_and_choices(how: str) -> None:
    pinned = Attention(4, 8, required_backend="torch_math", supported_backends=["torch_math"])
    twin = COPIES[how](pinned)
    assert same(pinned, twin)
    with pytest.raises(torch_ops.AttentionOverrideError, match="pinned"):
        apply_attention_backend_override(twin, "torch_flash")


def test_pickles_are_small_and_know_no_kernels(layer: Attention) -> None:
    for target in ("torch_math", "torch_flash", "torch_math"):
        apply_attention_backend_override(layer, target)
        layer(*support.inputs(layer, batch=64))
    assert len(pickle.dumps(layer)) < 3000
    assert len(pickle.dumps(layer)) == len(pickle.dumps(copy.deepcopy(layer)))


def test_state_dict_is_empty_and_loads(layer: Attention) -> None:
    model = nn.ModuleDict({"proj": nn.Linear(2, 2), "attn": layer})
    assert set(model.state_dict()) == {"proj.weight", "proj.bias"}
    apply_attention_backend_override(layer, "torch_math")
    model.load_state_dict(model.state_dict(), strict=True)
    assert layer.backend is AttentionBackend.TORCH_MATH
    assert not list(layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_moving_to_a_dtype_keeps_the_override(layer: Attention, dtype: torch.dtype) -> None:
    apply_attention_backend_override(layer, "torch_math")
    layer(*support.inputs(layer))
    assert layer.to(dtype) is layer
    assert layer.backend is AttentionBackend.TORCH_MATH
    inputs = support.inputs(layer, dtype=dtype)
    out = layer(*inputs)
    assert out.dtype == dtype
    assert support.worst(out, layer.spec, *inputs) <= 1


def test_overrides_are_prepared_where_the_layer_is_called(script: Any) -> None:
    layer = support.layers(support.stack(1))[0]
    layer(*support.inputs(layer, dtype=torch.bfloat16))  # never moved to bfloat16
    apply_attention_backend_override(layer, "scripted_one")
    prepared = script.counts["prepare", "scripted_one"]
    assert prepared == 1
    layer(*support.inputs(layer, dtype=torch.bfloat16))
    assert script.counts["prepare", "scripted_one"] == prepared
    layer.to(torch.float64)
    apply_attention_backend_override(layer, "scripted_two")
    assert script.counts["prepare", "scripted_two"] == 1
    layer(*support.inputs(layer, dtype=torch.float64))
    assert script.counts["prepare", "scripted_two"] == 1, "it wasn't prepared where it was moved"


def test_a_layer_knows_where_it_was_called_last(layer: Attention) -> None:
    for dtype in (torch.float32, torch.float16, torch.float32):
        layer(*support.inputs(layer, dtype=dtype))
        assert layer._place().dtype == dtype


def test_a_layer_that_moved_away_and_back_notes_its_calls_again(script: Any) -> None:
    layer = support.layers(support.stack(1))[0]
    narrow = support.inputs(layer, dtype=torch.bfloat16)
    layer(*narrow)
    layer.to(torch.float64).to(torch.float32)
    layer(*narrow)  # its plan was made before
    apply_attention_backend_override(layer, "scripted_one")
    script.acts["prepare", "scripted_one", 1.0] = pytest.fail
    assert layer(*narrow).eq(1).all()


def test_a_call_while_an_override_prepares_is_prepared_by_the_next_one(script: Any) -> None:
    layer = support.layers(support.stack(1))[0]
    narrow = support.inputs(layer, dtype=torch.bfloat16)
    layer(*support.inputs(layer))
    script.acts["prepare", "scripted_one", 1.0] = lambda: layer(*narrow) is None or None
    prepare_attention_backend_override(layer, "scripted_one")
    script.acts.clear()
    override_attention_backend(layer, "scripted_one")
    assert script.counts["prepare", "scripted_one"] == 2
    layer(*narrow)
    assert script.counts["prepare", "scripted_one"] == 2


def test_layers_on_meta_are_overridden_and_moved_back() -> None:
    with torch.device("meta"):
        layer = Attention(4, 8, 2, is_causal=True)
    assert layer.backend in AttentionBackend
    with override_attention_backend(layer, "torch_math") as token:
        assert token.report.switched == ("",)
        assert layer.backend is AttentionBackend.TORCH_MATH
        inputs = support.inputs(layer)  # the weights were loaded, this buffer wasn't
        assert support.worst(layer(*inputs), layer.spec, *inputs) <= 1
        layer.to_empty(device="cpu")
        assert support.worst(layer(*inputs), layer.spec, *inputs) <= 1
    assert attention_state(layer) == attention_state(Attention(4, 8, 2, is_causal=True))
    assert layer.to("meta").backend in AttentionBackend


def test_a_model_on_meta_refuses_what_it_could_not_run_here() -> None:
    layer = Attention(4, 8).to("meta")
    with pytest.raises(torch_ops.AttentionOverrideError, match="flashinfer_fa3"):
        override_attention_backend(layer, "flashinfer_fa3")


def test_layers_are_built_and_run_in_worker_threads(layer: Attention) -> None:
    built: list[Attention] = []

    def build() -> None:
        with torch.inference_mode():
            built.append(Attention(4, 8, 2, is_causal=True))
        apply_attention_backend_override(built[0], "torch_math")

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    apply_attention_backend_override(layer, "torch_math")
    assert same(layer, built[0])
    assert torch.compile(built[0], backend="eager", fullgraph=True)(*support.inputs(layer)).equal(
        layer(*support.inputs(layer))
    )


def test_deleted_layers_leave_nothing_behind() -> None:
    gc.collect()
    before = len(group._caches), len(group._states)
    model = support.stack(5)
    for target in ("torch_math", "torch_flash", None):
        override_attention_backend(model, target)
        model(*support.inputs(support.layers(model)[0]))
    assert (len(group._caches), len(group._states)) == (before[0] + 5, before[1] + 2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert (len(group._caches), len(group._states)) == before


def test_an_id_whose_layer_is_gone_is_refused() -> None:
    layer = Attention(4, 8)
    inputs, slot, route = support.inputs(layer), layer._slot, layer._group.route
    del layer
    gc.collect()
    with pytest.raises(torch_ops.NotPreparedError, match=f"no layer has the id {len(slot)}"):
        operators.run_layer(*inputs, slot, route)
