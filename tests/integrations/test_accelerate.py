"""`accelerate`: what it replaces, what it leaves alone, and that it can be undone."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_ops.attention import Attention
from torch_ops.errors import NoBackwardError
from torch_ops.integrations.extras import MissingExtraError
from torch_ops.integrations.transformers import accelerate
from torch_ops.integrations.transformers.projection import FusedLinears

from . import support
from .support import CACHE, FAMILIES, LAYERS, model, tokens, transformers

PARTS = ("input_layernorm", "post_attention_layernorm", "mlp", "self_attn")
EXPECTED = {f"model.layers.{i}.{part}" for i in range(LAYERS) for part in PARTS} | {
    "model.norm",
    "model.rotary_emb",
    "lm_head",
}


def modules(made: nn.Module) -> dict[str, int]:
    return {name: id(module) for name, module in made.named_modules()}


def snapshot(made: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in made.state_dict().items()}


def assert_same_state(made: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = made.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 2])
def test_logits_are_as_accurate_as_the_untouched_models(family: str, batch: int) -> None:
    made, ids = model(family), tokens(batch)
    truth, plain = support.exact(made, ids), made(ids).logits
    acceleration = accelerate(made)
    assert set(acceleration.replaced) == EXPECTED
    assert acceleration.left == (
        ("model.embed_tokens", "Embedding isn't replaced (of torch.nn only the output Linear is)"),
    )
    support.assert_as_accurate(made(ids).logits, plain, truth)
    support.assert_as_accurate(made(ids, use_cache=False).logits, plain, truth)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_tokens_are_the_untouched_models(family: str, batch: int) -> None:
    made, ids = model(family), tokens(batch)
    expected = support.generate(made, ids)
    accelerate(made)
    assert torch.equal(support.generate(made, ids), expected)


def test_beams_and_a_prompt_in_pieces_go_the_same_way() -> None:
    made, ids = model(), tokens(2)
    beams = support.generate(made, ids, num_beams=3)
    plain = made(ids).logits
    accelerate(made)
    assert torch.equal(support.generate(made, ids, num_beams=3), beams)
    cache = transformers.DynamicCache(config=made.config)
    pieces = [made(piece, **{CACHE: cache}).logits for piece in ids.split([4, 1, 4], dim=1)]
    support.assert_as_accurate(torch.cat(pieces, dim=1), plain, support.exact(model(), ids))


@pytest.mark.parametrize("window", [2, 5])
def test_a_sliding_window_is_kept(window: int) -> None:
    made, ids = model("Mistral", sliding_window=window), tokens(2, 11)
    truth, plain, expected = support.exact(made, ids), made(ids).logits, support.generate(made, ids)
    full = model("Mistral", sliding_window=None)(ids).logits
    assert (full - plain).abs().max() > 1e-2  # the window matters in this test
    accelerate(made)
    support.assert_as_accurate(made(ids).logits, plain, truth)
    assert torch.equal(support.generate(made, ids), expected)


def test_the_state_keeps_names_objects_and_memory() -> None:
    made = model()
    before, parameters = snapshot(made), dict(made.named_parameters())
    size = _bytes(made)
    accelerate(made)
    assert_same_state(made, before)
    for name, parameter in made.named_parameters():
        assert parameter is parameters[name], name
    attention = sum(module._anchor.nbytes for module in _attention(made))
    table = made.model.rotary_emb.cos_sin_cache.nbytes
    assert (
        _bytes(made)
        == size + table + attention - made.model.rotary_emb._original[0].inv_freq.nbytes * 2
    )
    block = made.model.layers[0].mlp._weight
    assert block.untyped_storage().nbytes() == 2 * made.model.layers[0].mlp.up_proj.weight.nbytes


def _attention(made: nn.Module) -> list[Any]:
    return [module for module in made.modules() if isinstance(module, Attention)]


def _bytes(made: nn.Module) -> int:
    """Memory of all parameters, buffers and blocks, each storage once."""
    tensors = [*made.parameters(), *made.buffers()]
    fused = (m._weight for m in made.modules() if isinstance(m, FusedLinears))
    tensors += [weight for weight in fused if weight is not None]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_undo_restores_bit_for_bit(family: str) -> None:
    made, ids = model(family), tokens()
    before, names, plain, configured = snapshot(made), modules(made), made(ids).logits, made.config
    acceleration = accelerate(made)
    assert modules(made) != names
    acceleration.undo()
    assert modules(made) == names
    assert made.config is configured
    assert made.model.config is configured
    assert_same_state(made, before)
    assert torch.equal(made(ids).logits, plain)
    storages = [p.untyped_storage()._cdata for p in made.parameters()]
    assert len(set(storages)) == len(storages)  # no parameter is a piece of a block any more
    acceleration.undo()  # a second time changes nothing
    assert modules(made) == names
    assert "undone" in str(acceleration)


def test_undo_refuses_once_a_replacement_was_replaced() -> None:
    made = model()
    acceleration = accelerate(made)
    placed = made.model.layers[1].mlp
    made.model.layers[1].mlp = nn.Identity()
    names = modules(made)
    with pytest.raises(RuntimeError, match=r"model\.layers\.1\.mlp no longer holds"):
        acceleration.undo()
    assert modules(made) == names
    made.model.layers[1].mlp = placed
    acceleration.undo()
    assert type(made.model.layers[1].mlp).__name__ == "LlamaMLP"


def test_a_second_time_is_a_no_op_that_says_so() -> None:
    made, ids = model(), tokens()
    first = accelerate(made)
    names, logits = modules(made), made(ids).logits
    second = accelerate(made)
    assert second.replaced == ()
    assert {name for name, reason in second.left if reason == "already accelerated"} == EXPECTED
    assert "nothing was changed" in str(second)
    second.undo()
    assert modules(made) == names
    assert torch.equal(made(ids).logits, logits)
    first.undo()


def test_another_model_of_the_class_and_config_is_untouched() -> None:
    shared = support.config()
    one, other = model(shared=shared), model(shared=shared, seed=1)
    names, ids = modules(other), tokens()
    plain = other(ids).logits
    padded = torch.ones_like(ids)
    padded[:, 0] = 0
    masked = other(ids, attention_mask=padded).logits
    accelerate(one)
    assert modules(other) == names
    assert other.config is shared
    assert torch.equal(other(ids).logits, plain)
    assert torch.equal(other(ids, attention_mask=padded).logits, masked)


def test_the_callers_mode_does_not_matter() -> None:
    made, ids = model(), tokens()
    plain = made(ids).logits
    with torch.inference_mode():
        acceleration = accelerate(made)
        logits = made(ids).logits
    assert torch.equal(made(ids).logits, logits)
    assert not any(p.is_inference() for p in [*made.parameters(), *made.buffers()])
    with torch.inference_mode():
        acceleration.undo()
    assert not any(p.is_inference() for p in [*made.parameters(), *made.buffers()])
    assert torch.equal(made(ids).logits, plain)


def test_a_part_of_a_model_and_the_rest_later() -> None:
    made, ids = model(), tokens()
    truth, plain = support.exact(made, ids), made(ids).logits
    inner = accelerate(made.model)
    assert "norm" in inner.replaced
    outer = accelerate(made)
    assert outer.replaced == ("lm_head",)
    support.assert_as_accurate(made(ids).logits, plain, truth)
    outer.undo()
    inner.undo()
    assert torch.equal(made(ids).logits, plain)


def test_the_table_joins_layers_and_gives_reasons() -> None:
    text = str(accelerate(model()))
    assert "model.layers.*.mlp (3)" in text
    assert "silu_and_mul" in text
    assert "torch_flash" in text
    assert "Embedding isn't replaced (of torch.nn only the output Linear is)" in text
    assert f"{len(EXPECTED)} modules replaced, 1 left" in text


class OwnMLP(nn.Module):
    """A module that nobody knows."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(self, x: torch.Tensor) -> Any:
        """Something of its own."""
        return self.original(x) * 0.5


def test_unknown_types_are_left_alone_and_listed() -> None:
    made, ids = model(), tokens()
    layer = made.model.layers[1]
    layer.mlp = OwnMLP(layer.mlp)
    subclass = type("LlamaRMSNorm", (type(layer.input_layernorm),), {})
    layer.input_layernorm.__class__ = subclass
    plain = made(ids).logits
    acceleration = accelerate(made)
    left = dict(acceleration.left)
    assert left["model.layers.1.mlp"] == f"unknown type {OwnMLP.__module__}.OwnMLP"
    assert left["model.layers.1.input_layernorm"].startswith("unknown type ")
    assert isinstance(layer.mlp, OwnMLP)
    assert type(layer.input_layernorm) is subclass
    # Inside of what nobody knows, what is known is replaced.
    assert "model.layers.1.mlp.original" in acceleration.replaced
    assert (made(ids).logits - plain).abs().max() <= 1e-3 * plain.abs().max()
    acceleration.undo()
    assert torch.equal(made(ids).logits, plain)


def test_a_model_without_known_attention_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    accelerate(made).undo()
    assert not caplog.records
    attention = type("OwnAttention", (type(made.model.layers[2].self_attn),), {})
    for layer in made.model.layers:
        layer.self_attn.__class__ = attention
    accelerate(made)
    (record,) = caplog.records
    known = "no attention of LlamaForCausalLM was replaced (known: Llama, Mistral, "
    assert known in record.getMessage()


def test_one_unknown_attention_keeps_the_whole_decoders() -> None:
    made, ids = model(), tokens()
    made.model.layers[2].self_attn.__class__ = type(
        "OwnAttention", (type(made.model.layers[2].self_attn),), {}
    )
    plain = made(ids).logits
    acceleration = accelerate(made)
    left = dict(acceleration.left)
    for name in ("model.rotary_emb", "model.layers.0.self_attn", "model.layers.1.self_attn"):
        assert "also serves model.layers.2.self_attn, of an unknown type" in left[name]
    assert "model.layers.2.mlp" in acceleration.replaced
    assert made.config._attn_implementation != "torch_ops"
    assert (made(ids).logits - plain).abs().max() <= 1e-3 * plain.abs().max()


def _set_hook(made: Any) -> None:
    made.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def _set_forward(made: Any) -> None:
    mlp = made.model.layers[0].mlp
    mlp.forward = mlp.forward


def _set_lora(made: Any) -> None:
    mlp = made.model.layers[0].mlp
    mlp.gate_proj.__class__ = type("Adapted", (nn.Linear,), {})


def _set_activation(made: Any) -> None:
    made.model.layers[0].mlp.act_fn = nn.ReLU()


def _set_dtype(made: Any) -> None:
    made.model.layers[0].mlp.gate_proj.to(torch.float64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set_hook, "it has forward hooks"),
        (_set_forward, "its forward was replaced on the instance"),
        (_set_lora, "gate_proj is a Adapted, not a plain torch.nn.Linear"),
        (_set_activation, "no op computes its activation ReLU"),
        (_set_dtype, "its projections differ in dtype"),
    ],
)
def test_what_does_not_fit_is_left_alone_with_the_reason(change: Any, reason: str) -> None:
    made = model()
    change(made)
    original = made.model.layers[0].mlp
    acceleration = accelerate(made)
    assert dict(acceleration.left)["model.layers.0.mlp"].startswith(reason)
    assert made.model.layers[0].mlp is original
    assert "model.layers.1.mlp" in acceleration.replaced


def _move(layer: Any) -> None:
    """Wrap forward on the instance, as libraries do that move weights between devices."""
    plain = layer.forward
    layer.forward = lambda x: plain(x) * 1.5


def _hook(layer: Any) -> None:
    layer.register_forward_hook(lambda _module, _args, out: out * 1.5)


def _assign(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight * 1.5, requires_grad=False)


def _set_data(layer: Any) -> None:
    layer.weight.data = layer.weight * 1.5


def _add_bias(layer: Any) -> None:
    layer.bias = nn.Parameter(torch.ones(layer.weight.shape[0]), requires_grad=False)


def _load(layer: Any) -> None:
    layer.load_state_dict({"weight": layer.weight * 1.5}, assign=True)


def _parametrize(layer: Any) -> None:
    class Larger(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 1.5

    nn.utils.parametrize.register_parametrization(layer, "weight", Larger())


@pytest.mark.parametrize(
    "change", [_move, _hook, _assign, _set_data, _add_bias, _load, _parametrize]
)
@pytest.mark.parametrize("late", [False, True])
def test_changes_of_a_projection_take_part(change: Any, late: bool) -> None:
    for name in ("self_attn.k_proj", "mlp.down_proj"):
        made, other, ids = model(num_hidden_layers=1), model(num_hidden_layers=1), tokens()
        plain, layer = made(ids).logits, f"model.layers.0.{name}"
        change(other.get_submodule(layer))
        expected = other(ids).logits
        assert (expected - plain).abs().max() > 1e-2  # the change matters in this test
        if late:
            accelerate(made)
            change(made.get_submodule(layer))
        else:
            change(made.get_submodule(layer))
            accelerate(made)
        logits = made(ids).logits
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max(), name


def test_models_that_share_a_block_are_undone_apart() -> None:
    made, other, ids = model(num_hidden_layers=1), model(num_hidden_layers=1), tokens()
    other.model.layers[0].mlp = made.model.layers[0].mlp
    first, _ = accelerate(made), accelerate(other)
    first.undo()
    with torch.no_grad():
        made.model.layers[0].mlp.up_proj.weight.mul_(2)
    expected = made(ids).logits
    assert (other(ids).logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_is_compiled_runs_the_hooks_that_were_there() -> None:
    made, ids = model(num_hidden_layers=1), tokens()
    accelerate(made)
    _hook(made.model.layers[0].mlp.up_proj)
    expected = made(ids).logits
    step: Any = torch.compile(made, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(step(ids).logits, expected)


def test_frequencies_that_depend_on_the_length_keep_attention_as_it_is() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    made = model(rope_parameters=rope)
    left = dict(accelerate(made).left)
    assert "rope type 'dynamic' changes its frequencies" in left["model.rotary_emb"]
    assert "rope type 'dynamic'" in left["model.layers.0.self_attn"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
)
def test_scaled_frequencies_are_kept(rope: dict[str, Any]) -> None:
    made, ids = model(rope_parameters=rope), tokens(1, 20)
    truth, plain = support.exact(made, ids), made(ids).logits
    assert "model.rotary_emb" in accelerate(made).replaced
    support.assert_as_accurate(made(ids).logits, plain, truth)


@pytest.mark.parametrize("failing", [0, 1, 4])
def test_a_failure_half_way_changes_nothing(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ids = model(), tokens()
    before, names, configured = snapshot(made), modules(made), made.config
    plain = made(ids).logits
    calls = iter(range(100))
    fuse = FusedLinears.fuse

    def fail(self: FusedLinears) -> None:
        if next(calls) == failing:
            raise MemoryError("no memory for a block")
        fuse(self)

    monkeypatch.setattr(FusedLinears, "fuse", fail)
    with pytest.raises(MemoryError, match="no memory"):
        accelerate(made)
    monkeypatch.undo()
    assert modules(made) == names
    assert made.config is configured
    assert_same_state(made, before)
    assert torch.equal(made(ids).logits, plain)
    assert set(accelerate(made).replaced) == EXPECTED


@pytest.mark.parametrize("failing", [0, 3])
def test_an_undo_that_fails_goes_on_where_it_was(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, ids = model(), tokens()
    before, names, plain = snapshot(made), modules(made), made(ids).logits
    acceleration = accelerate(made)
    calls, clone = iter(range(100)), torch.Tensor.clone

    def fail(self: torch.Tensor) -> torch.Tensor:
        if next(calls) == failing:
            raise MemoryError("no memory for a parameter")
        return clone(self)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", fail)
        with pytest.raises(MemoryError, match="no memory"):
            acceleration.undo()
    acceleration.undo()
    assert modules(made) == names
    assert_same_state(made, before)
    assert torch.equal(made(ids).logits, plain)
    storages = [p.untyped_storage()._cdata for p in made.parameters()]
    assert len(set(storages)) == len(storages)


def test_an_attention_backend_is_chosen_or_refused_before_anything_changes() -> None:
    made = model()
    names = modules(made)
    with pytest.raises(ValueError, match="nope"):
        accelerate(made, attention="nope")
    assert modules(made) == names
    accelerate(made, attention="torch_math")
    assert {layer.backend.value for layer in _attention(made)} == {"torch_math"}


def test_weights_are_loaded_in_place_and_by_assignment() -> None:
    made, other, ids = model(), model(seed=1), tokens()
    expected = other(ids).logits
    acceleration = accelerate(made)
    for assign in (False, True):
        made.load_state_dict({n: v.clone() for n, v in model().state_dict().items()}, assign=assign)
        assert not torch.equal(made(ids).logits, expected)
        made.load_state_dict({n: v.clone() for n, v in other.state_dict().items()}, assign=assign)
        assert (made(ids).logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    acceleration.undo()
    assert_same_state(made, snapshot(other))
    assert torch.equal(made(ids).logits, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_changes_its_dtype_before_and_after(dtype: torch.dtype) -> None:
    ids = tokens()
    early, late, plain = model().to(dtype), model(), model().to(dtype)
    accelerate(early)
    acceleration = accelerate(late)
    late.to(dtype)
    assert late.model.rotary_emb.cos_sin_cache.dtype == torch.float32
    assert late.model.layers[0].mlp._weight.dtype == dtype
    frequencies = early.model.rotary_emb._original[0].inv_freq
    if torch.equal(frequencies, model().model.rotary_emb.inv_freq):
        assert torch.equal(early(ids).logits, late(ids).logits)
    else:  # to() rounded the frequencies of the untouched model, but not those of the table
        assert dtype == torch.bfloat16
    acceleration.undo()
    assert torch.equal(late(ids).logits, plain(ids).logits)


def test_copies_are_independent() -> None:
    made, ids = model(), tokens()
    accelerate(made)
    logits = made(ids).logits
    stream = io.BytesIO()
    torch.save(made, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), loaded):
        assert torch.equal(other(ids).logits, logits)
        with torch.no_grad():
            other.model.layers[0].mlp.up_proj.weight.mul_(2)
            other.model.layers[0].self_attn.k_proj.weight.mul_(2)
        assert not torch.equal(other(ids).logits, logits)
        assert torch.equal(made(ids).logits, logits)
        assert _bytes(other) == _bytes(made)


def test_a_replaced_projection_takes_part() -> None:
    made, ids = model(), tokens()
    accelerate(made)
    mlp, logits = made.model.layers[0].mlp, made(ids).logits

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    plain = mlp.gate_proj
    doubled = Doubled(plain.in_features, plain.out_features, bias=False)
    doubled.weight = plain.weight
    mlp.gate_proj = doubled
    changed = made(ids).logits
    assert not torch.equal(changed, logits)
    with torch.no_grad():
        plain.weight.mul_(2)
    mlp.gate_proj = plain
    assert (made(ids).logits - changed).abs().max() <= 1e-5 * changed.abs().max()


def test_a_saved_model_is_a_plain_one(tmp_path: Path) -> None:
    made, ids = model(), tokens()
    plain = made(ids).logits
    accelerate(made)
    made.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation != "torch_ops"
    assert torch.equal(loaded(ids).logits, plain)


def test_hidden_states_are_given_and_attentions_again_after_undo() -> None:
    made, ids = model(), tokens()
    made.set_attn_implementation("eager")
    plain = made(ids, output_hidden_states=True, output_attentions=True)
    for warm in (True, False):
        made = model()
        made.set_attn_implementation("eager")
        if warm:
            made(ids, output_hidden_states=True)
        acceleration = accelerate(made)
        assert set(acceleration.replaced) == EXPECTED
        states = made(ids, output_hidden_states=True).hidden_states
        assert len(states) == LAYERS + 1
        with pytest.raises(ValueError, match="output_attentions: received True"):
            made(ids, output_attentions=True)
        acceleration.undo()
        again = made(ids, output_hidden_states=True, output_attentions=True)
        assert len(again.hidden_states) == LAYERS + 1
        for old, new in zip(plain.attentions, again.attentions, strict=True):
            assert torch.equal(old, new)


def test_gradients_are_refused() -> None:
    made, ids = model(), tokens()
    accelerate(made)
    made.requires_grad_(True)
    with pytest.raises(NoBackwardError, match=r"weight requires grad"):
        made(ids)
    made.requires_grad_(False)
    made.model.layers[0].mlp.up_proj.requires_grad_(True)
    with pytest.raises(NoBackwardError, match=r"up_proj\.weight requires grad"):
        made(ids)
    with torch.no_grad():
        made(ids)


def test_without_transformers_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"pip install 'torch-ops\[transformers\]'"
    ) as raised:
        accelerate(nn.Identity())
    assert "\n" not in str(raised.value)
    assert raised.value.packages == ("transformers",)


def test_a_module_without_anything_known_is_left_as_it_is() -> None:
    acceleration = accelerate(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert acceleration.replaced == ()
    assert [name for name, _ in acceleration.left] == ["0", "1"]


@pytest.mark.parametrize("model", [None, {}])
def test_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(
        TypeError, match=r"accelerate: argument 'model' is a \w+ \(accepted: a torch"
    ):
        accelerate(model)


def test_parts_whose_rotary_embedding_is_elsewhere_keep_their_attention() -> None:
    made, ids = model(), tokens()
    plain = made(ids).logits
    acceleration = accelerate(made.model.layers)
    assert dict(acceleration.left)["0.self_attn"].startswith("its rotary embedding isn't in what")
    assert "0.mlp" in acceleration.replaced
    assert (made(ids).logits - plain).abs().max() <= 1e-4 * plain.abs().max()
    acceleration.undo()
    for part in (made.model.norm, made.model.rotary_emb, made.model.layers[0].self_attn):
        assert accelerate(part).left[0] == ("", "it is what was given: give what holds it")
    accelerate(made)
    made.model.layers[0] = model().model.layers[0]
    assert "model.layers.0.self_attn" in accelerate(made).replaced  # its table is there
    assert (made(ids).logits - plain).abs().max() <= 1e-4 * plain.abs().max()


@pytest.mark.parametrize("late", [None, True, False])
def test_the_mode_is_handed_on_and_back(late: bool | None) -> None:
    made = model()
    made.model.layers[0].self_attn.o_proj.train()
    before = {name: module.training for name, module in made.named_modules()}
    acceleration = accelerate(made)
    after = {name: module.training for name, module in made.named_modules()}
    assert {name: after[name] for name in before if name in after}.items() <= before.items()
    if late is not None:
        made.train(late)
        before = dict.fromkeys(before, late)
    acceleration.undo()
    assert {name: module.training for name, module in made.named_modules()} == before


def test_hooks_are_handed_back() -> None:
    made, ids = model(num_hidden_layers=1), tokens()
    acceleration = accelerate(made)
    seen: list[str] = []
    names = ("model.norm", "model.layers.0.mlp", "model.layers.0.self_attn", "lm_head")
    handles = [
        made.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
        for name in names
    ]
    acceleration.undo()
    made(ids)
    assert sorted(seen) == sorted(names)
    for handle in handles:
        handle.remove()
    made(ids)
    assert len(seen) == len(names)
    made.model.norm.register_full_backward_hook(lambda *_: None)
    assert dict(accelerate(made).left)["model.norm"].startswith("it has backward hooks")


def test_dropout_and_noise_of_training_are_refused() -> None:
    made, ids = model(attention_dropout=0.5), tokens()
    noisy = model("Mixtral", router_jitter_noise=0.1)
    accelerate(made)
    accelerate(noisy)
    expected = made(ids).logits
    with pytest.raises(ValueError, match=r"dropout: received 0\.5, accepted: 0\.0; call eval"):
        made.train()(ids)
    with pytest.raises(ValueError, match=r"router_jitter_noise: received 0\.1, accepted: 0\.0"):
        noisy.train()(ids)
    assert torch.equal(made.eval()(ids).logits, expected)
