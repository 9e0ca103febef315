"""`PagedCache`: many sequences in one pool, planned outside of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

import torch_ops
from torch_ops.errors import TorchOpsError
from torch_ops.integrations.transformers import accelerate
from torch_ops.integrations.transformers.paged_layer import PagedLayer

from . import support
from .support import CACHE, LAYERS, OutOfPagesError, PagedCache, model, tokens, transformers

FAMILIES = [
    pytest.param("Llama", {}, id="Llama"),
    pytest.param("Mistral", {"sliding_window": 4}, id="Mistral"),
    pytest.param("Gemma2", {}, id="Gemma2"),
    pytest.param("Phi3", {}, id="Phi3"),
]


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """On CPUs only Inductor takes caps; what it would compile is as good a test, in no time."""
    with torch.compiler.set_stance("force_eager"):
        yield


def paged(made: Any, pages: int = 32, **more: Any) -> Any:
    return PagedCache(made.config, pages, page_size=4, **more)


def run(made: Any, cache: Any, rows: Tensor, **more: Any) -> Tensor:
    """Logits ``[T, vocabulary]`` of tokens in any shape."""
    out: Tensor = made(rows, **{CACHE: cache}, **more).logits
    return out.flatten(0, 1)


@torch.no_grad()
def serve(made: Any, cache: Any, prompts: list[Tensor], count: int) -> list[list[int]]:
    """Greedy tokens of prompts that run packed, then step by step."""
    sequences = [cache.open() for _ in prompts]
    lengths = [len(prompt) for prompt in prompts]
    cache.plan(sequences, lengths)
    logits = run(made, cache, torch.cat(prompts)[None])
    last = logits[torch.tensor(lengths).cumsum(0) - 1].argmax(-1)
    out = [last]
    for _ in range(count - 1):
        cache.plan(sequences, [1] * len(prompts))
        out.append(run(made, cache, out[-1][:, None]).argmax(-1))
    return torch.stack(out, 1).tolist()


def alone(made: Any, prompt: Tensor, count: int) -> list[int]:
    found: list[int] = support.generate(made, prompt[None], count)[0, len(prompt) :].tolist()
    return found


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_generate_takes_it(family: str, changes: dict[str, Any], padded: bool) -> None:
    made, ids = model(family, **changes), tokens(2)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :5] = 0
    made.set_attn_implementation("eager")
    expected = support.generate(made, ids, 5, attention_mask=mask)
    accelerate(made)
    cache = paged(made)
    with torch_ops.trace() as seen:
        found = support.generate(made, ids, 5, attention_mask=mask, **{CACHE: cache})
    assert torch.equal(found, expected)
    counts: dict[tuple[str, str], int] = {}
    for r in seen.records:
        counts[r.op, r.backend.value] = counts.get((r.op, r.backend.value), 0) + r.count
    # Prompts of one length read their own keys, rotated; the pages are for what goes on.
    later = (5 if padded else 4) * LAYERS
    assert counts["apply_rope_append_paged_kv_", "torch"] == later
    assert counts.get(("append_paged_kv_", "torch"), 0) == 5 * LAYERS - later
    assert counts["attention", "torch_math"] == later
    # 13 columns were written, five of them padding: no page is held for those.
    assert cache.free_pages == 32 - 4 - (2 if padded else 4)
    cache.reset()
    assert cache.free_pages == 32


def attend_by_two_ops(
    layer: Any, step: Any, batch: int, q: Tensor, k: Tensor, v: Tensor, angles: Tensor, attn: Any
) -> Tensor:
    q, k = torch.ops.torch_ops.apply_rope(q, k, angles, step.positions)
    torch.ops.torch_ops.append_paged_kv_(k, v, layer.keys, layer.values, step.slots)
    if batch == step.fresh:
        out: Tensor = attn(*(x.unflatten(0, (batch, -1)) for x in (q, k, v))).flatten(0, 1)
    else:
        out = attn(q, layer.keys, layer.values, step.metadata)
    return out


@torch.no_grad()
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3"])
def test_one_op_changes_no_bit_and_nothing_that_others_hold(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are written over, but not those that a hook has seen."""
    made, ids = model(family), tokens(2)
    accelerate(made)
    first, seen = made.model.layers[0].self_attn, list[tuple[Tensor, Tensor]]()

    def steps() -> list[Tensor]:
        cache = paged(made)
        logits = [made(ids, **{CACHE: cache}).logits, made(ids[:, :1], **{CACHE: cache}).logits]
        return [*logits, *(x for layer in cache.layers for x in (layer.keys, layer.values))]

    found = steps()
    layer = first.q_norm if first.normalizes else getattr(first, first.fused[0])
    handle = layer.register_forward_hook(lambda *args: seen.append((args[2], args[2].clone())))
    steps()
    handle.remove()
    assert len(seen) == 2
    assert all(torch.equal(held, copy) for held, copy in seen)
    monkeypatch.setattr(PagedLayer, "attend", attend_by_two_ops)
    assert all(map(torch.equal, found, steps()))


def test_packed_prompts_come_and_go() -> None:
    made = model("Qwen3")
    prompts = [tokens(1, n, seed=n)[0] for n in (9, 1, 6)]
    expected = [alone(made, prompt, 5) for prompt in prompts]
    accelerate(made)
    cache = paged(made, 9)
    assert serve(made, cache, prompts, 5) == expected
    assert [cache.length(sequence) for sequence in range(3)] == [13, 5, 10]
    assert cache.free_pages == 9 - 4 - 2 - 3
    cache.close(0)
    cache.cut(2, 4)
    assert cache.free_pages == 9 - 2 - 1
    assert serve(made, cache, prompts[:1], 5) == expected[:1]  # in pages of others
    cache.plan([2], [2])  # the sequence goes on behind what it kept
    rest = run(made, cache, prompts[2][None, 4:])
    assert rest[-1].argmax() == expected[2][0]
    with pytest.raises(KeyError, match="no sequence 0 is open"):
        cache.length(0)


def test_out_of_pages_loses_nothing() -> None:
    made = model()
    prompts = [tokens(1, n, seed=n)[0] for n in (7, 8)]
    expected = [alone(made, prompt, 4) for prompt in prompts]
    accelerate(made)
    cache = paged(made, 4)
    first, second = cache.open(), cache.open()
    cache.plan([first, second], [7, 8])
    logits = run(made, cache, torch.cat(prompts)[None])
    out = [[int(logits[6].argmax())], [int(logits[14].argmax())]]
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    with pytest.raises(OutOfPagesError, match="1 more pages are needed and 0 of 4 are") as raised:
        cache.plan([first, second], [1, 1])
    assert (raised.value.needed, raised.value.free) == (1, 0)
    assert isinstance(raised.value, TorchOpsError)
    assert (cache.length(first), cache.length(second), cache.free_pages) == (7, 8, 0)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    cache.plan([first], [1])  # there is room in its last page
    out[0].append(int(run(made, cache, torch.tensor([[out[0][0]]])).argmax()))
    assert out[0] == expected[0][:2]
    cache.close(first)  # by the caller, to let the other one go on
    for _ in range(3):
        cache.plan([second], [1])
        out[1].append(int(run(made, cache, torch.tensor([[out[1][-1]]])).argmax()))
    assert out[1] == expected[1]


def test_a_batch_that_finds_no_pages_can_go_on() -> None:
    made, ids = model(), tokens(2, 8)
    expected = support.generate(made, ids, 4)
    accelerate(made)
    cache = paged(made, 5)
    other = cache.open()
    cache.plan([other], [1])
    run(made, cache, ids[:1, :1])
    made(ids, **{CACHE: cache})
    with pytest.raises(OutOfPagesError):
        made(expected[:, 8:9], **{CACHE: cache})
    assert (cache.get_seq_length(), cache.free_pages) == (8, 0)
    cache.close(other)
    with pytest.raises(OutOfPagesError, match="2 more pages are needed and 1 of 5"):
        made(expected[:, 8:9], **{CACHE: cache})
    bigger = paged(made, 6)
    assert torch.equal(support.generate(made, ids, 4, **{CACHE: bigger}), expected)
    refused = paged(made, 3)
    with pytest.raises(OutOfPagesError):
        made(ids, **{CACHE: refused})
    assert refused.free_pages == 3
    assert refused.pool.sequences() == ()


def test_a_forward_that_was_broken_off_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ids = model(), tokens(2)
    accelerate(made)
    expected = made(ids).logits
    cache = paged(made)

    def fail(*_: Any) -> None:
        raise RuntimeError("broken off")

    sequence = cache.open()
    with monkeypatch.context() as patch:
        patch.setattr(made.model.layers[1].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="broken off"):
            made(ids, **{CACHE: cache})
        assert cache.get_seq_length() == 0
    assert torch.equal(made(ids, **{CACHE: cache}).logits, made(ids, **{CACHE: paged(made)}).logits)
    assert cache.get_seq_length() == 9
    cache.plan([sequence], [4])
    cache.plan([sequence], [9])  # nobody ran the first plan
    assert cache.length(sequence) == 9
    logits = run(made, cache, ids[1:])
    assert (logits - expected[1]).abs().max() <= 1e-5 * expected.abs().max()
    cache.plan([sequence], [1])
    cache.drop_plan()
    assert cache.length(sequence) == 9


def test_drafts_are_taken_back() -> None:
    made, assistant, ids = model(), model(seed=1, num_hidden_layers=1), tokens()
    expected = support.generate(made, ids)
    accelerate(made)
    cache = paged(made)
    found = support.generate(made, ids, assistant_model=assistant, **{CACHE: cache})
    assert torch.equal(found, expected)
    held = cache.length(0)
    assert cache.free_pages == 32 - -(-held // 4)


def test_a_prefix_is_used_again() -> None:
    made, ids = model(), tokens(1, 12)
    expected = support.generate(made, ids)
    accelerate(made)
    cache = paged(made)
    support.generate(made, ids[:, :8], 3, **{CACHE: cache})
    cache.crop(-3)
    assert torch.equal(support.generate(made, ids, **{CACHE: cache}), expected)


def test_bfloat16_pages() -> None:
    made, ids = model().to(torch.bfloat16), tokens(2)
    plain, truth = made(ids).logits, support.exact(made, ids)
    accelerate(made)
    cache = paged(made, dtype=torch.bfloat16)
    support.assert_as_accurate(made(ids, **{CACHE: cache}).logits, plain, truth)


def largest_allocation(call: Callable[[], object]) -> int:
    """Bytes of the largest allocation that is made meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    return max(int(event.cpu_memory_usage) for event in profiler.events())


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_serves_twenty_steps_and_copies_no_cache() -> None:
    made = model("Qwen3", num_hidden_layers=1)
    prompts = [tokens(1, n, seed=n)[0] for n in (5, 3)]
    expected = [alone(made, prompt, 21) for prompt in prompts]
    accelerate(made)
    cache, counter = paged(made, 4096), CompileCounterWithBackend("inductor")
    step: Any = torch.compile(made, fullgraph=True, backend=counter)
    sequences = [cache.open(), cache.open()]
    cache.plan(sequences, [5, 3])
    logits = run(made, cache, torch.cat(prompts)[None])
    out = [[int(logits[4].argmax())], [int(logits[7].argmax())]]
    with torch.no_grad():
        with pytest.raises(Exception, match=r"call plan\(\) before a compiled forward"):
            step(torch.zeros(3, 1, dtype=torch.long), **{CACHE: cache})
        for number in range(20):
            here = [0, 1] if number % 5 else [1, 0]  # rows are whose the plan says
            cache.plan([sequences[i] for i in here], [1, 1], rows=3)
            last = torch.tensor([[out[i][-1]] for i in here] + [[0]])
            chosen = run(step, cache, last).argmax(-1)
            for row, i in enumerate(here):
                out[i].append(int(chosen[row]))
    assert out == expected
    assert counter.frame_count == 1
    cache.plan(sequences, [1, 1], rows=3)
    keys, last = cache.layers[0].keys, torch.zeros(3, 1, dtype=torch.long)
    with torch.no_grad():
        assert largest_allocation(lambda: run(step, cache, last)) < keys.nbytes / 8
    assert largest_allocation(keys.clone) >= keys.nbytes


def test_layers_that_are_not_accelerated_refuse_it() -> None:
    made, ids = model(), tokens()
    with pytest.raises(ValueError, match="attention that isn't accelerated, accepted: models"):
        made(ids, **{CACHE: paged(made)})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_dtypes_that_attention_can_not_read_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"argument 'dtype' is {dtype} .accepted: one of torch.fl"):
        paged(model(), dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [0]), r"argument 'counts' is \[0\]"),
        (([0, 1], [1]), r"argument 'counts' is \[1\]"),
        (([], []), r"argument 'sequences' is \[\]"),
        (([0, 0], [1, 1]), r"argument 'sequences' is \[0, 0\]"),
        (([0], [65]), r"sequence 0 would have 65 tokens \(accepted: at most 64, the model"),
        (([0], [1.0]), r"argument 'counts' is \[1.0\]"),
        (([0], [1], 2.0), r"argument 'rows' is 2.0"),
        (([0], [2], 1), r"argument 'rows' is 1 .*rows for all 2 tokens"),
    ],
)
def test_plans_out_of_range_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    cache = paged(model())
    cache.open(), cache.open()
    rows = {"rows": arguments[2]} if len(arguments) > 2 else {}
    with pytest.raises(ValueError, match=message):
        cache.plan(*arguments[:2], **rows)
    assert cache.free_pages == 32


def test_forwards_that_do_not_fit_the_plan_are_refused() -> None:
    made, ids = model(), tokens(2)
    accelerate(made)
    cache = paged(made)
    sequence = cache.open()
    cache.plan([sequence], [9])
    for change in (cache.close, lambda sequence: cache.cut(sequence, 0)):
        with pytest.raises(ValueError, match="sequence 0 is part of a planned step"):
            change(sequence)
    with pytest.raises(ValueError, match="received 18 tokens, accepted: 9, as planned"):
        made(ids, **{CACHE: cache})
    mask = torch.ones(1, 9)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="padding for a planned step"):
        made(ids[:1], attention_mask=mask, **{CACHE: cache})
    cache.reset()
    made(ids, **{CACHE: cache})
    with pytest.raises(ValueError, match="received a batch of 1, accepted: 2, as before"):
        made(ids[:1], **{CACHE: cache})
    with pytest.raises(ValueError, match="beam search isn't served"):
        support.generate(made, ids, num_beams=2, **{CACHE: paged(made)})
    with pytest.raises(KeyError, match="no sequence 7 is open"):
        cache.plan([7], [1])
    padded = paged(made)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    made(ids, attention_mask=mask, **{CACHE: padded})
    for number in (-1, 1):
        with pytest.raises(ValueError, match=rf"crop of {number} \(accepted: 0 to 0"):
            padded.crop(number)


@pytest.mark.parametrize("number", ["pages", "page_size"])
def test_a_pool_has_pages_and_tokens(number: str) -> None:
    sizes = {"pages": 1, "page_size": 1, number: 0}
    with pytest.raises(ValueError, match=f"argument '{number}' is 0"):
        PagedCache(model().config, **sizes)


def test_generate_is_told_of_room_for_drafts_and_no_static_slots() -> None:
    cache = paged(model(), 3)
    assert (cache.get_max_length(), cache.is_compileable, cache.is_croppable) == (12, False, True)
    assert isinstance(cache, transformers.Cache)


def test_caches_of_other_models_are_refused() -> None:
    made, ids = model(), tokens()
    accelerate(made)
    for config, dtype in (
        (support.config(num_hidden_layers=2), torch.float32),
        (support.config(num_hidden_layers=4), torch.float32),
        (support.config("Qwen3"), torch.float32),
        (support.config(), torch.bfloat16),
    ):
        cache = PagedCache(config, 8, page_size=4, dtype=dtype)
        with pytest.raises(ValueError, match="received keys of a model with layers 3, heads 2"):
            made(ids, **{CACHE: cache})
        assert (cache.free_pages, cache.pool.sequences()) == (8, ())
    with pytest.raises(TypeError, match=r"'config' is a LlamaForCausalLM .accepted: a config"):
        PagedCache(made, 8)


def test_positions_of_other_distances_are_refused() -> None:
    made, ids = model(), tokens(2)
    accelerate(made)
    cache, positions = paged(made), torch.arange(9)[None]
    with pytest.raises(ValueError, match="0 to 8 more than the places of their tokens in seq"):
        made(ids, position_ids=positions * 2, **{CACHE: cache})
    assert (cache.free_pages, cache.pool.sequences()) == (32, ())
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = made(ids, attention_mask=mask, position_ids=positions + 4).logits
    logits = made(ids, attention_mask=mask, position_ids=positions + 4, **{CACHE: cache}).logits
    assert (logits - expected)[mask.bool()].abs().max() <= 1e-4 * expected.abs().max()
    longer = torch.cat((mask, mask[:, -1:]), 1)
    with pytest.raises(ValueError, match=r"0 to 0 more .* in sequence 2, .* or all 4 more"):
        made(
            ids[:, :1], attention_mask=longer, position_ids=positions[:, -1:] + 1, **{CACHE: cache}
        )
    assert cache.get_seq_length() == 9
    last = positions[:, -1:] + 5
    made(ids[:, :1], attention_mask=longer, position_ids=last, **{CACHE: cache})
    assert [cache.length(s) for s in cache.pool.sequences()] == [10, 7]
