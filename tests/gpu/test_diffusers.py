"""A diffusion transformer in CUDA graphs: replayed, and one component's attention swapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.integrations.diffusion import inputs, model, run
from torch_ops.attention import override_attention_backend
from torch_ops.integrations.diffusers import accelerate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]
SIZES: dict[str, Any] = {
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "axes_dims_rope": (16, 24, 24),
}


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_is_replayed_and_a_swap_of_some_blocks_compiles_nothing() -> None:
    made: Any = model(**SIZES).to("cuda", torch.bfloat16)
    arguments = {
        name: value.to("cuda", torch.bfloat16) if isinstance(value, Tensor) else value
        for name, value in inputs().items()
    }
    plain = run(made, arguments).float()
    accelerate(made, attention="torch_flash")
    counters.clear()
    step: Any = torch.compile(made, fullgraph=True, mode="reduce-overhead")

    def assert_near() -> Tensor:
        for _ in range(3):  # warmed up, recorded, replayed
            out = run(step, arguments).clone()
        # bfloat16 has 8 bits; the blocks' roundings differ where Inductor fuses them.
        assert (out.float() - plain).abs().max() <= 2**-4 * plain.abs().max()
        return out

    before = assert_near()
    with override_attention_backend(made, "triton", where="transformer_blocks.*") as token:
        assert token.report.switched == ("transformer_blocks.0.attn.processor.attention",)
        assert_near()
    assert torch.equal(assert_near(), before)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1
