"""Diffusion transformers of diffusers on torch_ops: as accurate, one by one, undone."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_ops
from torch_ops.attention import Attention, override_attention_backend
from torch_ops.integrations.diffusers import accelerate, known

from .diffusion import KINDS, assert_near, diffusers, exact, inputs, model, run
from .support import assert_as_accurate

DOUBLE, SINGLE = "transformer_blocks.0.attn.processor", "single_transformer_blocks.0.attn.processor"


def modules(made: nn.Module) -> dict[str, int]:
    return {name: id(module) for name, module in made.named_modules(remove_duplicate=False)}


def norms_of(made: nn.Module) -> set[str]:
    """Names of the norms, by what their classes are called."""
    endings = ("LayerNorm", "RMSNorm")
    return {name for name, part in made.named_modules() if type(part).__name__.endswith(endings)}


def processors_of(made: Any) -> set[str]:
    return set(made.attn_processors)


def families(made: nn.Module) -> dict[str, str]:
    """What each attention layer would run."""
    found = ((n, m) for n, m in made.named_modules() if isinstance(m, Attention))
    return {name: layer.backend.value for name, layer in found}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_replaced_is_as_accurate_and_is_undone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, arguments = model(kind), inputs(kind)
    truth, plain = exact(made, arguments, monkeypatch), run(made, arguments)
    names, parts = modules(made), norms_of(made) | processors_of(made)
    state = {name: id(p) for name, p in made.named_parameters()}
    processors = {name: id(p) for name, p in made.attn_processors.items()}
    acceleration = accelerate(made)
    ropes = {"Flux": {"pos_embed"}, "QwenImage": {"pos_embed"}, "Wan": {"rope"}}
    assert set(acceleration.replaced) == parts | ropes.get(kind, set())
    (left,) = acceleration.left
    assert left[1] == "unknown type diffusers.models.embeddings.Timesteps"
    assert list(made.state_dict()) == list(model(kind).state_dict())
    fast = run(made, arguments)
    assert_as_accurate(fast, plain, truth)
    again = accelerate(made)
    assert again.replaced == ()
    listed = {name for name, reason in again.left if reason == "already accelerated"}
    assert listed == set(acceleration.replaced)
    again.undo()
    assert torch.equal(run(made, arguments), fast)
    acceleration.undo()
    assert modules(made) == names
    assert {name: id(p) for name, p in made.attn_processors.items()} == processors
    assert {name: id(p) for name, p in made.named_parameters()} == state
    assert torch.equal(run(made, arguments), plain)


def test_another_model_of_the_class_and_what_diffusers_keeps_are_untouched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other, arguments = model(), model(seed=1), inputs()
    plain, names = run(other, arguments), modules(other)
    dispatch: Any = importlib.import_module("diffusers.models.attention_dispatch")
    active = dispatch._AttentionBackendRegistry.get_active_backend()
    accelerate(one, attention="torch_math")
    expected = run(one, arguments)
    assert modules(other) == names
    assert torch.equal(run(other, arguments), plain)
    assert dispatch._AttentionBackendRegistry.get_active_backend() == active
    with dispatch.attention_backend("_native_flash"):
        assert torch.equal(run(one, arguments), expected)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("attention of diffusers ran")

    flux = importlib.import_module("diffusers.models.transformers.transformer_flux")
    monkeypatch.setattr(flux, "dispatch_attention_fn", forbidden)
    run(one, arguments)
    with pytest.raises(AssertionError, match="attention of diffusers ran"):
        run(other, arguments)


def pipeline(transformer: nn.Module) -> Any:
    """A pipeline that takes and gives latents."""
    absent = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    made = diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(),
        **dict.fromkeys(absent),
        transformer=transformer,
    )
    made.set_progress_bar_config(disable=True)
    return made


def painted(made: Any) -> tuple[Tensor, dict[str, int]]:
    """Latents after two steps, and how often which family attended."""
    generator = torch.Generator().manual_seed(2)
    text = {"prompt_embeds": torch.ones(1, 3, 8), "pooled_prompt_embeds": torch.ones(1, 8)}
    with torch_ops.trace() as seen:
        latents = made(
            **text,
            height=32,
            width=32,
            num_inference_steps=2,
            output_type="latent",
            generator=generator,
        ).images
    return latents, {r.backend.value: r.count for r in seen.records if r.op == "attention"}


def test_an_override_in_one_pipeline_does_not_reach_another() -> None:
    first, second = pipeline(model()), pipeline(model())
    with pytest.raises(TypeError, match=r"is a FluxPipeline .*pipeline\.transformer"):
        accelerate(first)
    plain, ran = painted(first)
    assert ran == {}
    for made in (first, second):
        accelerate(made.transformer)
    fast, ran = painted(first)
    assert ran == {"torch_flash": 4}
    assert_near(fast, plain)
    names = [f"{DOUBLE}.attention", f"{SINGLE}.attention"]
    with (
        override_attention_backend(
            first.transformer, "torch_math", where="transformer_blocks.*"
        ) as token,
        override_attention_backend(second.transformer, "torch_math", where="single_*"),
    ):
        assert token.report.switched == tuple(names[:1])
        assert families(first.transformer) == dict(
            zip(names, ("torch_math", "torch_flash"), strict=True)
        )
        assert families(second.transformer) == dict(
            zip(names, ("torch_flash", "torch_math"), strict=True)
        )
        changed, ran = painted(first)
        assert ran == {"torch_math": 2, "torch_flash": 2}
        assert_near(changed, plain)
    again, ran = painted(second)
    assert ran == {"torch_flash": 4}
    assert torch.equal(again, fast)


def roles(made: nn.Module) -> dict[str, str | None]:
    """Role of the attention layers, by the attention's name in its block."""
    found = ((n, m) for n, m in made.named_modules() if isinstance(m, Attention))
    return {name.split(".")[2]: layer.role for name, layer in found}


def test_both_attentions_of_a_block_have_layers_of_their_own() -> None:
    made, arguments = model("SD3"), inputs("SD3")
    assert made.transformer_blocks[0].attn.processor is made.transformer_blocks[0].attn2.processor
    plain = run(made, arguments)
    acceleration = accelerate(made)
    assert roles(made) == {"attn": "joint", "attn2": "self"}
    video = model("Wan")
    accelerate(video)
    assert roles(video) == {"attn1": "self", "attn2": "cross"}
    with override_attention_backend(made, "torch_math", where="*.attn2.*") as token:
        assert token.report.switched == ("transformer_blocks.0.attn2.processor.attention",)
        assert_near(run(made, arguments), plain)
    mask = {"joint_attention_kwargs": {"attention_mask": torch.ones(2, 19, dtype=torch.bool)}}
    with pytest.raises(
        ValueError, match=r"shape \[2, 19\], accepted: None; the original disregards"
    ):
        run(made, {**arguments, **mask})
    acceleration.undo()
    assert made.transformer_blocks[0].attn.processor is made.transformer_blocks[0].attn2.processor


@pytest.mark.parametrize("shape", [(2, 9), (2, 1, 1, 9)])
def test_a_mask_of_keys_is_honored_and_another_refused(shape: tuple[int, ...]) -> None:
    made, arguments = model(), inputs()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 2], mask[1, 1:3] = False, False
    arguments["joint_attention_kwargs"] = {"attention_mask": mask.reshape(shape)}
    plain = run(made, arguments)
    accelerate(made)
    assert_near(run(made, arguments), plain)
    mask[:] = True
    arguments["joint_attention_kwargs"] = {}
    expected = run(made, arguments)
    arguments["joint_attention_kwargs"] = {"attention_mask": mask}
    assert torch.equal(run(made, arguments), expected)
    for other in (mask.float(), mask[:, None, :, None] & mask[:, None, None], mask[:, :3]):
        arguments["joint_attention_kwargs"] = {"attention_mask": other}
        with pytest.raises(
            ValueError, match=r"attention_mask: received torch\..*accepted: None, or"
        ):
            run(made, arguments)


def test_the_texts_mask_of_qwen_image_is_honored() -> None:
    made, arguments = model("QwenImage"), inputs("QwenImage")
    arguments["encoder_hidden_states_mask"] = torch.tensor(
        [[True, True, True], [True, False, False]]
    )
    plain = run(made, arguments)
    accelerate(made)
    assert_near(run(made, arguments), plain)


def test_what_nobody_knows_is_left_alone_and_listed(caplog: pytest.LogCaptureFixture) -> None:
    made, arguments = model(), inputs()
    double, single = made.transformer_blocks[0], made.single_transformer_blocks[0]
    flux = importlib.import_module("diffusers.models.transformers.transformer_flux")
    strange = flux.FluxIPAdapterAttnProcessor(32, 8)
    double.attn.set_processor(strange)
    arguments["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(2, 4, 8)]}
    single.norm.norm.register_forward_hook(lambda *_: None)
    double.norm2 = nn.GroupNorm(3, 6, affine=False)
    plain = run(made, arguments)
    acceleration = accelerate(made)
    left = dict(acceleration.left)
    assert left[DOUBLE].endswith("FluxAttention with the processor " + known.class_of(strange))
    assert left["pos_embed"].startswith("transformer_blocks.0.attn may take it as it is")
    assert left["single_transformer_blocks.0.norm.norm"].startswith("it has forward hooks")
    assert left["transformer_blocks.0.norm2"] == "no op computes GroupNorm"
    assert {SINGLE, "transformer_blocks.0.attn.norm_q"} < set(acceleration.replaced)
    assert double.attn.processor is strange
    assert_near(run(made, arguments), plain)
    assert "apply_rope, torch_flash" in str(acceleration)
    acceleration.undo()
    assert torch.equal(run(made, arguments), plain)
    assert not caplog.records
    single.attn.__class__ = type("OwnAttention", (flux.FluxAttention,), {})
    assert "OwnAttention" in dict(accelerate(made).left)[SINGLE]
    (record,) = caplog.records
    assert "no attention of FluxTransformer2DModel was replaced (known: Fl" in record.getMessage()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_positions_that_a_model_keeps_may_be_converted(dtype: torch.dtype) -> None:
    arguments = inputs("Wan")
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            arguments[name] = value.to(dtype)
    plain = run(model("Wan").to(dtype), arguments)
    truth = run(model("Wan"), inputs("Wan"))
    allowed = 4 * (plain - truth).abs().max() + 1e-5
    early, late = model("Wan").to(dtype), model("Wan")
    accelerate(early)
    accelerate(late)
    for made in (early, late.to(dtype)):
        assert (run(made, arguments) - truth).abs().max() <= allowed


def test_undo_after_the_original_was_put_back() -> None:
    made = model()
    plain, processors = run(made, inputs()), made.attn_processors
    acceleration = accelerate(made)
    made.set_attn_processor(processors)
    acceleration.undo()
    assert torch.equal(run(made, inputs()), plain)
