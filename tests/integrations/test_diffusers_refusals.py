"""What accelerated diffusion transformers refuse, keep, and do when they are compiled or copied."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_ops
from torch_ops import NoBackwardError
from torch_ops.attention import Attention, override_attention_backend
from torch_ops.integrations.diffusers import accelerate
from torch_ops.integrations.extras import MissingExtraError

from .diffusion import assert_near, diffusers, inputs, model, run

DOUBLE, SINGLE = "transformer_blocks.0.attn.processor", "single_transformer_blocks.0.attn.processor"


def test_choices_made_by_diffusers_are_kept_before_and_refused_after() -> None:
    made, arguments = model(), inputs()
    plain = run(made, arguments)
    made.transformer_blocks[0].attn.set_attention_backend("_native_math")
    acceleration = accelerate(made)
    reason = dict(acceleration.left)[DOUBLE]
    assert reason.startswith("set_attention_backend chose AttentionBackendName._NATIVE_MATH for it")
    assert_near(run(made, arguments), plain)
    with pytest.raises(
        ValueError, match=r"use override_attention_backend of torch_ops\.attention, or"
    ):
        made.single_transformer_blocks[0].attn.set_attention_backend("native")
    with pytest.raises(
        ValueError, match="enable_parallelism: received 2 for attention that runs on"
    ):
        made.single_transformer_blocks[0].attn.processor._parallel_config = 2
    made.transformer_blocks[0].attn.processor._parallel_config = 2
    made.reset_attention_backend()
    reason = dict(accelerate(made).left)[DOUBLE]
    assert reason == "enable_parallelism spread it over devices"
    made.transformer_blocks[0].attn.processor._parallel_config = None
    assert accelerate(made).replaced == ("pos_embed", DOUBLE)


def test_a_backend_is_chosen_or_refused_before_anything_changes() -> None:
    made = model()
    before = dict(made.named_modules())
    with pytest.raises(ValueError, match="nope"):
        accelerate(made, attention="nope")
    assert dict(made.named_modules()) == before
    accelerate(made, attention="torch_math")
    layers = [layer for layer in made.modules() if isinstance(layer, Attention)]
    assert [layer.backend.value for layer in layers] == ["torch_math"] * 2


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # Chroma's own
def test_attention_in_blocks_that_mask_otherwise_or_see_an_image_is_left() -> None:
    sizes = dict.fromkeys(("in_channels", "joint_attention_dim"), 8)
    sizes |= {"attention_head_dim": 16, "num_attention_heads": 2, "num_single_layers": 1}
    sizes |= {
        "approximator_num_channels": 8,
        "approximator_hidden_dim": 8,
        "approximator_layers": 1,
    }
    chroma = diffusers.ChromaTransformer2DModel(num_layers=0, **sizes)
    assert dict(accelerate(chroma).left)[SINGLE].startswith("it is in a block of unknown type ")
    wan = model("Wan", added_kv_proj_dim=24, image_dim=8)
    acceleration = accelerate(wan)
    assert dict(acceleration.left)["blocks.0.attn2.processor"] == (
        "it attends to an image beside the text"
    )
    assert "blocks.0.attn1.processor" in acceleration.replaced
    processors = importlib.import_module("diffusers.models.attention_processor")
    joint = processors.JointAttnProcessor2_0()
    grouped = processors.Attention(16, heads=2, kv_heads=1, dim_head=8, processor=joint)
    assert accelerate(grouped).left == (("processor", "its keys are 8 wide and its queries 16"),)


def test_embeddings_of_positions_that_are_unknown_or_watched_are_left() -> None:
    made, arguments = model(), inputs()
    plain = run(made, arguments)
    made.pos_embed.register_forward_hook(lambda *_: None)
    acceleration = accelerate(made)
    assert dict(acceleration.left)["pos_embed"].startswith("it has forward hooks")
    assert DOUBLE in acceleration.replaced
    assert_near(run(made, arguments), plain)
    acceleration.undo()
    made.pos_embed.__class__ = type("OwnEmbedding", (type(made.pos_embed),), {})
    left = dict(accelerate(made).left)
    reason = f"pos_embed is of unknown type {__name__}.OwnEmbedding"
    assert (left[DOUBLE], left[SINGLE]) == (reason, reason)
    assert left["pos_embed"] == f"unknown type {__name__}.OwnEmbedding"


def _norm_of_diffusers(**settings: Any) -> nn.Module:
    norms: Any = importlib.import_module("diffusers.models.normalization")
    made: nn.Module = norms.RMSNorm(8, eps=1e-6, **settings)
    return made.requires_grad_(False)


def test_norms_that_no_op_computes_are_left() -> None:
    norms = nn.Sequential(nn.RMSNorm(8), nn.LayerNorm((2, 8)), _norm_of_diffusers(bias=True))
    reasons = [reason for _, reason in accelerate(norms).left]
    assert reasons == [
        "its eps is None, which depends on the dtype of a call",
        "it normalizes over 2 dimensions",
        "it has a bias, which rms_norm has not",
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_norm_of_diffusers_gives_the_dtype_of_its_weight(dtype: torch.dtype) -> None:
    norms = nn.Sequential(_norm_of_diffusers())
    for weight in norms.parameters():
        nn.init.uniform_(weight, 0.5, 1.5)
    x = torch.randn(5, 8).to(torch.float16 if dtype == torch.float32 else torch.float32)
    plain = norms.to(dtype)(x)
    assert accelerate(norms).replaced == ("0",)
    assert_near(norms(x), plain, roundings=4)


def test_gradients_are_refused_and_checkpoints_do_no_harm() -> None:
    made, arguments = model(), inputs()
    plain = run(made, arguments)
    made.enable_gradient_checkpointing()
    made.train()
    accelerate(made)
    assert_near(run(made, arguments), plain)
    assert_near(made(**arguments)[0], plain)  # with checkpoints, and nothing to train
    made.requires_grad_(True)
    with pytest.raises(NoBackwardError, match="Attention: an input requires grad"):
        made(**arguments)
    assert_near(run(made, arguments), plain)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Flux", "transformer_blocks.0.attn.to_added_qkv"),
        ("Wan", "blocks.0.attn1.to_qkv"),
        ("Wan", "blocks.0.attn2.to_kv"),
    ],
)
def test_fused_projections_take_part(kind: str, name: str) -> None:
    made, arguments = model(kind), inputs(kind)
    plain = run(made, arguments)
    accelerate(made)
    split = run(made, arguments)
    made.fuse_qkv_projections()
    fused = run(made, arguments)
    assert_near(fused, plain)
    with torch.no_grad():
        made.get_submodule(name).weight.mul_(2)
    with pytest.raises(AssertionError, match="allowed"):
        assert_near(run(made, arguments), fused)
    made.unfuse_qkv_projections()
    assert torch.equal(run(made, arguments), split)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_changes_its_dtype(dtype: torch.dtype) -> None:
    made, arguments = model("SD3"), inputs("SD3")
    arguments = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    acceleration = accelerate(made)
    made.to(dtype)
    fast = run(made, arguments)
    acceleration.undo()
    assert_near(fast, run(made, arguments))
    accelerate(made)
    layers = [layer for layer in made.modules() if isinstance(layer, Attention)]
    assert {next(layer.buffers()).dtype for layer in layers} == {dtype}  # decides what serves it


def test_copies_are_independent_and_a_saved_model_is_a_plain_one(tmp_path: Path) -> None:
    made, arguments = model(), inputs()
    plain = run(made, arguments)
    acceleration = accelerate(made)
    fast = run(made, arguments)
    copied = pickle.loads(pickle.dumps(made))
    assert torch.equal(run(copied, arguments), fast)
    override_attention_backend(copied, "torch_math")
    assert made.get_submodule(f"{SINGLE}.attention").backend.value == "torch_flash"
    made.save_pretrained(tmp_path)
    loaded = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path)
    assert torch.equal(run(loaded, arguments), plain)
    made.load_state_dict({k: v.clone() for k, v in model(seed=1).state_dict().items()}, assign=True)
    acceleration.undo()
    assert torch.equal(run(made, arguments), run(model(seed=1), arguments))


@pytest.mark.usefixtures("fresh_dynamo", "opaque")
def test_one_graph_serves_and_a_swap_compiles_none() -> None:
    made, arguments = model(), inputs()
    plain = run(made, arguments)
    accelerate(made)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    step: Any = torch.compile(made, fullgraph=True, backend=count)
    with torch_ops.trace() as seen:
        assert_near(run(step, arguments), plain)
        with override_attention_backend(made, "torch_math", where="single_*"):
            assert_near(run(step, arguments), plain)
        assert_near(run(step, arguments), plain)
    assert len(graphs) == 1
    calls = {(r.op, r.backend.value): r.count for r in seen.records}
    assert calls["attention", "torch_math"] == 1
    assert calls["attention", "torch_flash"] == 5
    assert calls["apply_rope", "torch"] == 6


@pytest.mark.usefixtures("fresh_dynamo", "opaque")
def test_compiled_code_takes_a_mask_that_lets_all_through() -> None:
    made = model()
    accelerate(made)
    attend: Any = torch.compile(
        made.single_transformer_blocks[0].attn, fullgraph=True, backend="eager"
    )
    x, mask = torch.randn(2, 9, 32), torch.ones(2, 9, dtype=torch.bool)
    assert torch.equal(attend(x, attention_mask=mask), attend(x))
    mask[0, 0] = False
    with pytest.raises(RuntimeError, match="accepted in compiled code: None or all True"):
        attend(x, attention_mask=mask)


def test_without_diffusers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch-ops\[diffusers\]'") as raised:
        accelerate(nn.Identity())
    assert raised.value.packages == ("diffusers",)
