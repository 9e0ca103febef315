"""`PagedCache` in CUDA graphs: steps are replayed, and give what uncompiled ones give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.integrations.support import CACHE, PagedCache, model, tokens
from torch_ops.attention import override_attention_backend
from torch_ops.errors import AttentionOverrideError
from torch_ops.integrations.transformers import accelerate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
COUNT, ROWS = 24, 4


@torch.no_grad()
def decode(made: Any, step: Any, swaps: dict[int, str]) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy tokens and logits of three prompts in four rows."""
    cache = PagedCache(made.config, 64, page_size=16, dtype=torch.bfloat16, device="cuda")
    prompts = [tokens(1, n, seed=n)[0].cuda() for n in (5, 17, 30)]
    sequences = [cache.open() for _ in prompts]
    lengths = [len(prompt) for prompt in prompts]
    cache.plan(sequences, lengths)
    logits = made(torch.cat(prompts)[None], **{CACHE: cache}).logits[0]
    last = logits[torch.tensor(lengths).cumsum(0) - 1].argmax(-1)
    out, seen = [last.tolist()], []
    for number in range(COUNT):
        if number in swaps:
            override_attention_backend(made, swaps[number])
        cache.plan(sequences, [1] * len(prompts), rows=ROWS)
        rows = torch.nn.functional.pad(last, (0, ROWS - len(prompts)))[:, None]
        logits = step(rows, **{CACHE: cache}).logits[: len(prompts), 0].clone()
        last = logits.argmax(-1)
        out.append(last.tolist())
        seen.append(logits.float())
    return out, seen


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_decode_step_is_recorded_and_replayed() -> None:
    made = model("Qwen3", **SIZES).to("cuda", torch.bfloat16)
    accelerate(made)
    override_attention_backend(made, "triton")
    expected, plain = decode(made, made, {})
    counters.clear()
    step: Any = torch.compile(made, fullgraph=True, mode="reduce-overhead")
    found, logits = decode(made, step, {})
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1
    # bfloat16 has 8 bits; the layers' roundings differ where Inductor fuses them.
    for step_number, (ours, theirs) in enumerate(zip(logits, plain, strict=True)):
        if found[: step_number + 1] != expected[: step_number + 1]:
            break  # a tie fell the other way: what follows is another text
        assert (ours - theirs).abs().max() <= 2**-4 * theirs.abs().max()
    assert step_number > 4
    swapped, _ = decode(made, step, {8: "torch_math", 16: "triton"})
    assert swapped[:8] == found[:8]
    assert counters["stats"]["unique_graphs"] == 1


@torch.no_grad()
def queued(made: Any, step: Any, *, wait: bool) -> list[list[int]]:
    """Greedy tokens of three prompts; the host waits for each step, or for none of them."""
    cache = PagedCache(made.config, 64, page_size=16, dtype=torch.bfloat16, device="cuda")
    sequences = [cache.open() for _ in range(3)]
    cache.plan(sequences, [15] * 3)  # so that pages are added during what follows
    logits = made(tokens(1, 45, seed=1).cuda(), **{CACHE: cache}).logits[0]
    last, out = logits[14::15].argmax(-1), []
    for number in range(COUNT):
        if number == 6 and not wait:  # a graph is recorded, which waits, too
            wait_on_gpu: Any = torch.cuda._sleep
            wait_on_gpu(1 << 31)  # about a second, in which the other steps are planned
        cache.plan(sequences, [1] * 3)
        last = step(last[:, None], **{CACHE: cache}).logits[:, 0].argmax(-1)
        out.append(last)
        if wait:
            torch.cuda.synchronize()
    return torch.stack(out).tolist()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["triton", "flashinfer_fa2"])
def test_steps_that_are_queued_ahead_read_their_own_numbers(backend: str) -> None:
    made = model("Qwen3", **SIZES).to("cuda", torch.bfloat16)
    accelerate(made)
    try:
        override_attention_backend(made, backend)
    except AttentionOverrideError as error:
        pytest.skip(str(error))
    step: Any = torch.compile(made, fullgraph=True, mode="reduce-overhead")
    expected = queued(made, step, wait=True)
    assert queued(made, step, wait=True) == expected  # recorded by now
    assert queued(made, step, wait=False) == expected


@pytest.mark.usefixtures("fresh_dynamo")
def test_no_step_waits_for_the_gpu() -> None:
    made = model("Qwen3", **SIZES).to("cuda", torch.bfloat16)
    accelerate(made)
    override_attention_backend(made, "triton")
    step: Any = torch.compile(made, fullgraph=True, mode="reduce-overhead")
    cache = PagedCache(made.config, 64, page_size=16, dtype=torch.bfloat16, device="cuda")
    sequences = [cache.open() for _ in range(ROWS)]
    last = torch.zeros(ROWS, 1, dtype=torch.int64, device="cuda")
    try:
        with torch.no_grad():
            for number in range(8):
                if number == 4:  # compiled, warmed up and recorded
                    torch.cuda.set_sync_debug_mode("error")
                cache.plan(sequences, [1] * ROWS)
                last = step(last, **{CACHE: cache}).logits.argmax(-1)
            with pytest.raises(RuntimeError, match="synchronizing"):
                last.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")
