"""What each family of models has of its own, on torch_ops: as accurate, the same tokens, undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_ops.attention import Attention
from torch_ops.integrations.transformers import accelerate

from . import support
from .support import LAYERS, SPECIAL, model, tokens

FAMILIES = sorted(SPECIAL.keys() - {"Mistral", "Gemma2"})
MIXTURES = ("Mixtral", "Qwen2Moe", "Qwen3Moe")


def state(made: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """Every parameter and buffer by name: which object it is, and what it holds."""
    found = {**dict(made.named_parameters(remove_duplicate=False)), **dict(made.named_buffers())}
    return {name: (id(value), value.clone()) for name, value in found.items()}


def assert_unchanged(made: nn.Module, before: dict[str, tuple[int, Tensor]]) -> None:
    after = state(made)
    assert after.keys() == before.keys()
    for name, (number, value) in before.items():
        assert after[name][0] == number, name
        assert torch.equal(after[name][1], value), name


def expected(family: str) -> set[str]:
    """Modules that are replaced."""
    parts = {"input_layernorm", "post_attention_layernorm", "mlp", "self_attn"}
    if family.startswith("Gemma"):
        parts |= {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
    if family in ("Qwen3", "Qwen3Moe", "Gemma3"):
        parts |= {"self_attn.q_norm", "self_attn.k_norm"}
    if family == "Qwen2Moe":
        parts.add("mlp.shared_expert")
    names = {f"model.layers.{i}.{part}" for i in range(LAYERS) for part in parts}
    return names | {"model.norm", "model.rotary_emb", "lm_head"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_replaced_is_as_accurate_and_is_undone(family: str) -> None:
    made, ids = model(family), tokens(2, 11)
    truth, plain = support.exact(made, ids), made(ids).logits
    greedy = support.generate(made, ids, 8)
    before, modules, configured = state(made), dict(made.named_modules()), made.config
    acceleration = accelerate(made)
    assert set(acceleration.replaced) == expected(family)
    assert {name: id(value) for name, value in made.named_parameters()} == {
        name: before[name][0] for name, _ in made.named_parameters()
    }
    assert list(made.state_dict()) == list(model(family).state_dict())
    support.assert_as_accurate(made(ids).logits, plain, truth)
    support.assert_as_accurate(made(ids, use_cache=False).logits, plain, truth)
    assert torch.equal(support.generate(made, ids, 8), greedy)
    again = accelerate(made)
    assert again.replaced == ()
    assert {n for n, why in again.left if why == "already accelerated"} == expected(family)
    acceleration.undo()
    assert dict(made.named_modules()) == modules  # modules are equal where they are the same
    assert made.config is configured
    assert_unchanged(made, before)
    assert torch.equal(made(ids).logits, plain)


def test_a_cap_of_the_logits_is_kept() -> None:
    made, ids = model("Gemma2"), tokens(2)
    made.set_attn_implementation("eager")
    truth, plain = support.exact(made, ids), made(ids).logits
    greedy = support.generate(made, ids, 8)
    uncapped = model("Gemma2", attn_logit_softcapping=None)(ids).logits
    assert (uncapped - plain).abs().max() > 1e-2  # the cap matters in this test
    before = state(made)
    acceleration = accelerate(made)
    assert set(acceleration.replaced) == expected("Gemma2")
    # On CPUs only Inductor takes a cap; what it would compile is as good a test, and takes no time.
    with torch.compiler.set_stance("force_eager"):
        support.assert_as_accurate(made(ids).logits, plain, truth)
        assert torch.equal(support.generate(made, ids, 8), greedy)
    acceleration.undo()
    assert_unchanged(made, before)


def test_windows_caps_and_scales_are_those_of_each_layer() -> None:
    made = model("Gemma2")
    accelerate(made)
    specs = [module.spec for module in made.modules() if isinstance(module, Attention)]
    assert [spec.window_left for spec in specs] == [4, -1, 4]
    assert {spec.logits_soft_cap for spec in specs} == {2.0}
    assert {spec.scale for spec in specs} == {11**-0.5}


def test_one_of_two_models_of_a_class_is_accelerated() -> None:
    shared = support.config("Gemma3")
    one, other = model("Gemma3", shared=shared), model("Gemma3", shared=shared)
    ids = tokens()
    plain, classes = other(ids).logits, {type(module) for module in other.modules()}
    methods = {cls: dict(vars(cls)) for cls in classes}
    accelerate(one)
    assert {type(module) for module in other.modules()} == classes
    assert {cls: dict(vars(cls)) for cls in classes} == methods
    assert torch.equal(other(ids).logits, plain)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_logits_of_a_router_are_still_recorded(family: str) -> None:
    made, ids = model(family), tokens(2)
    plain = made(ids, output_router_logits=True).router_logits
    acceleration = accelerate(made)
    recorded = made(ids, output_router_logits=True).router_logits
    assert len(recorded) == len(plain) == LAYERS - (family == "Qwen3Moe")
    for ours, theirs in zip(recorded, plain, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    acceleration.undo()
    again = made(ids, output_router_logits=True).router_logits
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


class Doubled(nn.Module):
    """Stands in for a router or for experts."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(self, *args: Tensor) -> Any:
        """Twice what comes out last."""
        out = self.original(*args)
        return (out[0], 2 * out[1], out[2]) if isinstance(out, tuple) else 2 * out


def _replaced(experts: Any, name: str) -> None:
    setattr(experts, name, Doubled(getattr(experts, name)))


def _watched(experts: Any, name: str) -> None:
    def double(_module: object, _args: object, out: Any) -> Any:
        return (out[0], 2 * out[1], out[2]) if isinstance(out, tuple) else 2 * out

    getattr(experts, name).register_forward_hook(double)


@pytest.mark.parametrize("change", [_replaced, _watched])
@pytest.mark.parametrize("name", ["gate", "experts"])
def test_a_changed_router_or_experts_take_part(change: Any, name: str) -> None:
    made, other = (model("Mixtral", num_hidden_layers=1) for _ in range(2))
    ids = tokens()
    accelerate(made)
    for each in (made, other):
        change(each.model.layers[0].mlp, name)
    expected = other(ids).logits
    assert (made(ids).logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def _transposed(made: Any) -> None:
    experts = made.model.layers[0].mlp.experts
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.mT.contiguous())


def _interleaved(made: Any) -> None:
    made.model.layers[0].mlp.experts.is_concatenated = False


def _activation(made: Any) -> None:
    made.model.layers[0].mlp.experts.act_fn = nn.GELU()


def _hooked(made: Any) -> None:
    made.model.layers[0].mlp.gate.register_forward_hook(lambda *_: None)


def _own_experts(made: Any) -> None:
    experts = made.model.layers[0].mlp.experts
    experts.__class__ = type("OwnExperts", (type(experts),), {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_transposed, "its experts' weights are [5, 48, 160] and [5, 48, 80] (accepted: [E, 2 F"),
        (_interleaved, "its experts are laid out with is_concatenated=False"),
        (_activation, "no op computes experts with the activation GELU"),
        (_hooked, "its gate has forward hooks or a forward of its own"),
        (_own_experts, "its experts are of an unknown type OwnExperts"),
    ],
)
def test_experts_that_do_not_fit_are_left_with_the_reason(change: Any, reason: str) -> None:
    made = model("Mixtral")
    change(made)
    original = made.model.layers[0].mlp
    acceleration = accelerate(made)
    assert dict(acceleration.left)["model.layers.0.mlp"].startswith(reason)
    assert made.model.layers[0].mlp is original
    assert "model.layers.1.mlp" in acceleration.replaced


def test_bidirectional_attention_is_left_alone() -> None:
    made = model("Gemma3", use_bidirectional_attention=True)
    left = dict(accelerate(made).left)
    assert "its attention is bidirectional" in left["model.rotary_emb"]
    assert "its attention is bidirectional" in left["model.layers.0.self_attn"]


def test_a_decoder_in_a_model_of_images_runs_on_text() -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes = {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    configured = support.transformers.Gemma3Config(
        text_config=support.config("Gemma3").to_dict(),
        vision_config={**vision, **sizes},
        mm_tokens_per_image=4,
        image_token_index=90,
    )
    torch.manual_seed(0)
    made = support.transformers.Gemma3ForConditionalGeneration(configured).eval()
    made.requires_grad_(False)
    ids, before, tower = tokens(2), made.config, made.model.vision_tower.config
    plain, names = made(ids).logits, (before._attn_implementation, tower._attn_implementation)
    acceleration = accelerate(made)
    assert (made(ids).logits - plain).abs().max() <= 1e-4 * plain.abs().max()
    assert made.model.vision_tower.config is tower
    assert (before._attn_implementation, tower._attn_implementation) == names
    types = torch.zeros_like(ids)
    types[:, 2:5] = 1
    with pytest.raises(ValueError, match="a pattern that is not causal"):
        made(ids, token_type_ids=types)
    acceleration.undo()
    assert made.config is before
    assert torch.equal(made(ids).logits, plain)


def test_tied_weights_stay_tied() -> None:
    made, ids = model("Qwen3", tie_word_embeddings=True), tokens()
    truth, plain = support.exact(made, ids), made(ids).logits
    acceleration = accelerate(made)
    embedding = made.model.embed_tokens
    assert made.lm_head.weight is embedding.weight
    support.assert_as_accurate(made(ids).logits, plain, truth)
    made.to(torch.float64).to(torch.float32)
    assert made.lm_head.weight is embedding.weight
    with torch.no_grad():
        embedding.weight.mul_(2)
    doubled = made(ids).logits
    made.resize_token_embeddings(support.VOCABULARY + 3, mean_resizing=False)
    acceleration.undo()
    embedding = made.model.embed_tokens
    assert made.lm_head.weight is embedding.weight
    assert made.lm_head.out_features == embedding.num_embeddings == support.VOCABULARY + 3
    made.resize_token_embeddings(support.VOCABULARY)
    assert (made(ids).logits - doubled).abs().max() <= 1e-4 * doubled.abs().max()


def test_layers_that_share_a_parameter_are_not_joined() -> None:
    made, ids = model(), tokens()
    first, second = (made.model.layers[i].mlp for i in range(2))
    second.up_proj.weight = first.up_proj.weight
    plain = made(ids).logits
    acceleration = accelerate(made)
    left = dict(acceleration.left)
    for i in range(2):
        assert left[f"model.layers.{i}.mlp"] == "up_proj shares its parameter with another layer"
    assert "model.layers.2.mlp" in acceleration.replaced
    assert (made(ids).logits - plain).abs().max() <= 1e-4 * plain.abs().max()


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_parts_of_other_dtypes_do_as_they_did(family: str) -> None:
    """The last norm and the output layer in float32, as some are kept beside narrow layers."""
    made, ids = model(family).to(torch.bfloat16), tokens(2)
    made.model.norm.float()
    if family == "Llama":  # Gemma's norm gives back the dtype that it takes
        made.lm_head.float()
    plain = made(ids).logits
    truth = support.exact(made, ids)
    accelerate(made)
    logits = made(ids).logits
    assert logits.dtype == plain.dtype
    support.assert_as_accurate(logits, plain, truth)
