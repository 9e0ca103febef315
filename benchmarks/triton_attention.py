"""Compares tile sizes and kernels of Triton attention with each other and with peers, on a GPU.

``python -m benchmarks.triton_attention`` checks every candidate against float64 first and times
those that are right. Candidates compile in parallel processes; a candidate that hangs is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Case(NamedTuple):
    """A call of attention."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    causal: bool = True
    window: int = -1
    cap: float = 0.0
    value_dim: int = 0

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        window = f" w{self.window}" if self.window >= 0 else ""
        cap = f" cap{self.cap:g}" if self.cap else ""
        return (
            f"b{self.batch} {self.queries}x{self.keys} h{self.heads}/{self.kv_heads} "
            f"d{self.head_dim} {self.dtype} {kind}{window}{cap}"
        )


class Candidate(NamedTuple):
    """A kernel and how it works.

    ``long``: keys of a step, stages. ``plain`` and ``packed`` (all query heads of a key head at
    once): rows of a program, keys of a step, warps, stages. Or what the backend chooses, or a peer.
    """

    kind: str
    settings: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.kind, *map(str, self.settings)])


def _long(*settings: int) -> Candidate:
    return Candidate("long", settings)


def _plain(*settings: int) -> Candidate:
    return Candidate("plain", settings)


def _packed(*settings: int) -> Candidate:
    return Candidate("packed", settings)


PEERS = [Candidate(n) for n in ("torch_flash", "torch_cudnn", "flashinfer_fa2", "flashinfer_fa3")]
PREFILL = [Case(1, s, s, 32, 8, 128) for s in (256, 512, 1024, 2048, 4096, 16384)]
USUAL = [_long(128, 2), _long(64, 4), _plain(128, 64, 8, 3), _plain(128, 128, 8, 2)]
TIMED: dict[Case, list[Candidate]] = {
    **{case: [*USUAL, *PEERS] for case in PREFILL},
    Case(1, 4096, 4096, 32, 8, 128, causal=False): [USUAL[0], USUAL[2], *PEERS],
    Case(1, 16384, 16384, 32, 8, 128, window=1024): [*USUAL],
    Case(1, 4096, 4096, 32, 8, 128, cap=30.0): [*USUAL],
    Case(8, 2048, 2048, 32, 8, 64): [
        _long(128, 4), _long(128, 2), _long(64, 4), _plain(128, 64, 4, 3), _plain(128, 128, 8, 2),
        _plain(128, 64, 4, 2), *PEERS[:2],
    ],
    Case(1, 8192, 8192, 32, 8, 64): [_long(128, 4), _plain(128, 64, 4, 3), *PEERS],
    Case(1, 4096, 4096, 32, 8, 96): [_long(128, 2), _plain(128, 64, 8, 3), *PEERS[:2]],
    Case(1, 4096, 4096, 16, 8, 256): [_long(64, 2), _plain(128, 64, 8, 2), *PEERS[:2]],
    Case(1, 2048, 2048, 32, 8, 128, dtype="fp32"): [_plain(32, 32, 4, 1), Candidate("torch_math")],
    Case(16, 1, 8192, 32, 8, 128): [_packed(16, 128, 4, 3), _packed(16, 64, 4, 4), *PEERS[:2]],
    Case(4, 4, 4096, 32, 8, 128): [_packed(16, 128, 4, 3), _plain(16, 128, 4, 3), *PEERS[:1]],
    Case(4, 16, 4096, 32, 8, 128): [
        _packed(64, 64, 4, 3), _packed(64, 128, 4, 2), _plain(16, 128, 4, 3), *PEERS[:1],
    ],
    **{
        Case(4, n, 4096, 32, 8, 128): [
            _long(128, 2), _packed(128, 64, 8, 3), _packed(64, 64, 4, 3), _packed(128, 128, 8, 2),
            _plain(64, 64, 4, 3), _plain(128, 64, 8, 3), *PEERS[:1],
        ]
        for n in (32, 64, 128, 192)
    },
}  # fmt: skip
CHOSEN = Candidate("chosen")
OURS = ("long", "plain", "packed", "chosen")
ODD = [
    Case(1, 129, 1000, 6, 2, 80), Case(2, 200, 130, 4, 2, 96), Case(1, 256, 256, 2, 1, 192),
    Case(1, 130, 260, 4, 4, 256), Case(1, 300, 300, 4, 2, 100), Case(3, 7, 65, 10, 2, 64),
    Case(1, 1, 1, 1, 1, 8), Case(1, 4096, 4096, 2, 1, 128), Case(1, 200, 50, 4, 2, 128),
    Case(1, 300, 300, 4, 2, 128, causal=False, window=5), Case(1, 640, 640, 2, 2, 128, window=0),
    Case(2, 150, 150, 7, 1, 64), Case(1, 333, 333, 4, 2, 72, causal=False),
    Case(1, 150, 150, 4, 2, 128, cap=5.0), Case(2, 40, 300, 16, 1, 128, cap=30.0, window=64),
    Case(1, 150, 160, 4, 2, 64, value_dim=24), Case(1, 128, 128, 2, 2, 128),
    Case(1, 128, 4096, 2, 2, 128, causal=False), Case(5, 129, 129, 3, 3, 128),
]  # fmt: skip


def _checked() -> list[tuple[Case, Candidate]]:
    """List what is checked: each candidate that is timed, and the choice made for odd calls."""
    pairs: list[tuple[Case, Candidate]] = []
    for timed_case, candidates in TIMED.items():
        for candidate in candidates:
            if candidate.kind not in OURS:
                continue
            dtype, width = timed_case.dtype, timed_case.head_dim
            few = timed_case.queries < 32
            causal = Case(2, 1 if few else 300, 417, 8, 2, width, dtype)
            full = Case(1, 2 if few else 517, 389, 4, 4, width, dtype, causal=False)
            pairs += [(causal, candidate), (full, candidate)]
            if not few:
                pairs.append((Case(1, 400, 400, 4, 2, width, dtype, window=70), candidate))
            if dtype == "bf16":
                pairs.append((causal._replace(dtype="fp16"), candidate))
    pairs += [(case._replace(dtype=dtype), CHOSEN) for case in ODD for dtype in _DTYPES]
    return sorted(dict.fromkeys(pairs), key=lambda pair: pair[1].kind != "long")


def _tensors(case: Case, device: str, odd: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Make queries, keys and values; if odd, as views of buffers whose gaps are NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [
        (case.batch, case.queries, case.heads, case.head_dim),
        (case.batch, case.keys, case.kv_heads, case.head_dim),
        (case.batch, case.keys, case.kv_heads, case.value_dim or case.head_dim),
    ]
    made = []
    for shape in shapes:
        values = torch.randn(shape, generator=generator, device=device).to(_DTYPES[case.dtype])
        if odd:
            b, s, h, d = shape
            larger = (b, s + 9, h + 1, d + 8)
            buffer = torch.full(larger, math.nan, device=device, dtype=values.dtype)
            buffer[:, :s, :h, :d] = values
            values = buffer[:, :s, :h, :d]
        made.append(values)
    return made[0], made[1], made[2]


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give output and LSE in float64, and how far from them a kernel may be."""
    group = case.heads // case.kv_heads
    wide_q = q.double().transpose(1, 2)
    wide_k, wide_v = (t.double().transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    scale = case.head_dim**-0.5
    logits = scale * (wide_q @ wide_k.transpose(-1, -2))
    size = scale * (wide_q.abs() @ wide_k.abs().transpose(-1, -2))
    if case.cap:
        logits = case.cap * torch.tanh(logits / case.cap)
    place = torch.arange(case.queries, device=q.device)[:, None] + case.keys - case.queries
    key = torch.arange(case.keys, device=q.device)[None]
    seen = key <= place if case.causal else torch.ones_like(key <= place)
    if case.window >= 0:
        seen &= key >= place - case.window
    logits = logits.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    out, weight = p @ wide_v, p @ wide_v.abs()
    u, unit = torch.finfo(q.dtype).eps / 2, 2.0**-24
    largest = size.masked_fill(~seen, 0.0).amax(-1)
    e = unit * ((case.head_dim**0.5 + 2) * largest + 4 * case.cap)
    relative = torch.expm1(2 * e) + (8 + 2 * case.keys**0.5) * unit + u
    tiny = torch.finfo(q.dtype).tiny * u
    under = tiny * (1 + wide_v.abs().sum(-2, True))
    bound = out.abs() * u + weight * relative.unsqueeze(-1) + under
    size_of_lse = lse.abs().masked_fill(lse == -math.inf, 0.0)
    lse_bound = e + unit * (2 * size_of_lse + 4 + case.keys**0.5)
    transposed = (t.transpose(1, 2) for t in (out, lse, bound, lse_bound))
    return next(transposed), next(transposed), next(transposed), next(transposed)


def _module(name: str) -> Any:
    return importlib.import_module(f"torch_ops.backends.triton.{name}")


@contextlib.contextmanager
def _forced(candidate: Candidate) -> Iterator[None]:
    """Make the backend choose a candidate, whatever it would choose."""
    ours, hopper = _module("_attention"), _module("_attention_hopper")
    kept = ours.config, ours.packing, ours.fits, hopper.config
    if candidate.kind in ("plain", "packed"):
        ours.config = lambda *_: ours.Config(*candidate.settings)
        ours.packing = lambda _, group: group if candidate.kind == "packed" else 1
        ours.fits = lambda *_: False
    elif candidate.kind == "long":
        ours.fits = lambda *_: True
        hopper.config = lambda *_: hopper.LongConfig(*candidate.settings)
    _forget()
    try:
        yield
    finally:
        ours.config, ours.packing, ours.fits, hopper.config = kept
        _forget()


def _forget() -> None:
    for name in ("_attention", "_attention_hopper"):
        _module(name)._variant.cache_clear()
    _module("_attention")._plan.cache_clear()


def _ours(case: Case) -> Callable[..., Any]:
    forward = _module("_attention").forward
    return lambda q, k, v: forward(q, k, v, case.causal, None, case.window, case.cap, True)


def _peer(case: Case, name: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    scale = case.head_dim**-0.5
    if name.startswith("flashinfer"):
        import flashinfer

        if case.batch > 1:
            raise NotImplementedError("one sequence alone")
        return lambda: flashinfer.single_prefill_with_kv_cache(
            q[0], k[0], v[0], causal=case.causal, backend=name.removeprefix("flashinfer_")
        )
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    if name == "torch_math":
        kernel = torch.ops.aten._scaled_dot_product_attention_math
        return lambda: kernel(*heads, None, 0.0, case.causal, scale=scale, enable_gqa=True)
    causal = case.causal and case.queries > 1
    if causal and case.queries != case.keys and name == "torch_cudnn":
        raise NotImplementedError("aligns causal masks to the first key")
    if name == "torch_flash":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return lambda: kernel(*heads, 0.0, causal, scale=scale)
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    return lambda: cudnn(*heads, None, False, 0.0, causal, scale=scale)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


def _alive() -> bool:
    """Whether the GPU still works for this process after an error."""
    try:
        if _DEVICE == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _poison(*shapes: tuple[tuple[int, ...], torch.dtype]) -> None:
    """Leave NaN in the memory that the next tensors of these shapes get."""
    held = [torch.full(shape, math.nan, dtype=dtype, device=_DEVICE) for shape, dtype in shapes]
    del held


def _ratio(got: Tensor, want: Tensor, bound: Tensor) -> float:
    if not torch.equal(got.isinf(), want.isinf()) or bool(got.isnan().any()):
        return math.inf
    error = torch.where(want.isinf(), 0.0, (got.double() - want).abs())
    return float((error / bound).nan_to_num(0.0).max())


def check(pairs: list[tuple[Case, Candidate]], report: Any) -> None:
    """Compare candidates with float64, and reruns with each other bit for bit."""
    for case, candidate in pairs:
        report.put(("start", str(case), str(candidate)))
        try:
            q, k, v = _tensors(case, _DEVICE, odd=case.head_dim % 8 == 0)
            want, want_lse, bound, lse_bound = exact(case, q, k, v)
            shape = (case.batch, case.queries, case.heads, case.value_dim or case.head_dim)
            with _forced(candidate):
                run = _ours(case)
                _poison((shape, q.dtype), (shape[:3], torch.float32))
                got, lse = run(q, k, v)
                again, lse_again = run(q, k, v)
            ratios = _ratio(got, want, bound), _ratio(lse, want_lse, lse_bound)
            same = torch.equal(got, again) and torch.equal(lse, lse_again)
            report.put(("checked", str(case), str(candidate), *ratios, same))
        except Exception as error:
            report.put(("failed", str(case), str(candidate), _text(error)))
            if not _alive():
                break
    report.put(("end",))


def _flops(case: Case) -> float:
    """Count products of seen pairs of a query and a key alone."""
    pairs = float(case.queries * case.keys)
    if case.causal:
        pairs -= case.queries * (case.queries - 1) / 2
    if case.window >= 0:
        pairs = float(min(case.window + 1, case.keys) * case.queries)
    return 4.0 * case.batch * case.heads * case.head_dim * pairs


def _host(run: Callable[[], Any]) -> float:
    """Give the least microseconds that the host takes for a call, the GPU idle before it."""
    least = math.inf
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - start)
    torch.cuda.synchronize()
    return least * 1e6


def timed(case: Case, candidates: list[Candidate], report: Any) -> None:
    """Time candidates side by side; the median of each, in milliseconds."""
    from triton.testing import do_bench, do_bench_cudagraph

    q, k, v = _tensors(case, _DEVICE, odd=False, seed=1)
    for candidate in [CHOSEN, *candidates]:
        report.put(("start", str(case), str(candidate)))
        try:
            with _forced(candidate):
                run: Callable[[], Any]
                if candidate.kind in OURS:
                    run = functools.partial(_ours(case), q, k, v)
                else:
                    run = _peer(case, candidate.kind, q, k, v)
                run()
                torch.cuda.synchronize()
                if candidate.kind.startswith("flashinfer"):
                    spent = do_bench(run, warmup=20, rep=60, return_mode="median")
                else:
                    spent = do_bench_cudagraph(run, rep=60, return_mode="median")
                host = _host(run)
            speed = _flops(case) / spent / 1e9
            report.put(("timed", str(case), str(candidate), spent, speed, host))
        except Exception as error:
            report.put(("failed", str(case), str(candidate), _text(error)))
    report.put(("end",))


def compile_all(pairs: list[tuple[Case, Candidate]], report: Any) -> None:
    """Run candidates once on little data, so that other processes find them compiled."""
    for case, candidate in pairs:
        try:
            queries = min(case.queries, 130)
            small = case._replace(batch=1, queries=queries, keys=min(case.keys, 260))
            if case.window >= 0:
                small = small._replace(window=70)
            q, k, v = _tensors(small, _DEVICE, odd=False)
            with _forced(candidate):
                _ours(small)(q, k, v)
            torch.cuda.synchronize()
        except Exception as error:
            report.put(("failed", str(case), str(candidate), _text(error)))
    report.put(("end",))


def compile_flashinfer(report: Any) -> None:
    """Let FlashInfer compile the kernels that are timed."""
    case = PREFILL[0]._replace(queries=256, keys=256)
    q, k, v = _tensors(case, _DEVICE, odd=False)
    for name in ("flashinfer_fa2", "flashinfer_fa3"):
        try:
            _peer(case, name, q, k, v)()
        except Exception as error:
            report.put(("failed", str(case), name, _text(error)))
    report.put(("end",))


class _Child:
    """A process of its own for GPU work, killed when it reports nothing for too long."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue()
        self._process = context.Process(target=work, args=(*args, self._queue), daemon=True)
        self._process.start()

    def events(self, patience: float) -> Iterator[tuple[Any, ...]]:
        """Give what it reports until it ends; a hang is its last event."""
        current: tuple[Any, ...] = ("start", "?", "?")
        waited = 0.0
        while True:
            try:
                event = self._queue.get(timeout=2.0)
            except queue.Empty:
                waited += 2.0
                if self._process.is_alive() and waited < patience:
                    continue
                what = "hangs" if self._process.is_alive() else f"died {self._process.exitcode}"
                self._process.kill()
                yield ("failed", *current[1:3], what)
                return
            waited = 0.0
            if event[0] == "end":
                self._process.join(10)
                return
            if event[0] == "start":
                current = event
            yield event


def _compile_in_parallel(workers: int) -> None:
    timed_pairs = [(case, candidate) for case, found in TIMED.items() for candidate in found]
    pairs = [p for p in dict.fromkeys(_checked() + timed_pairs) if p[1].kind in OURS]
    children = [_Child(compile_all, pairs[i::workers]) for i in range(workers)]
    for child in children:
        for event in child.events(150.0):
            print("compile", *event[1:])


def _check_all(results: list[tuple[Any, ...]]) -> set[str]:
    """Check in processes that survive a kernel that hangs; gives names of wrong candidates."""
    wrong = set()
    pending = _checked()
    while pending:
        done = 0
        for event in _Child(check, pending).events(60.0):
            if event[0] != "start":
                done += 1
                results.append(event)
                if not (event[0] == "checked" and event[3] <= 1 and event[4] <= 1 and event[5]):
                    wrong.add(event[2])
                    print("WRONG", *event[1:])
        pending = pending[max(done, 1) :]
    right = [event for event in results if event[0] == "checked"]
    for index, what in ((3, "out"), (4, "lse")):
        worst = max(right, key=lambda event: event[index], default=None)
        print(f"checked {len(right)}; worst {what}:", *(worst or ("none",)))
    return wrong


def _time_all(results: list[tuple[Any, ...]], wrong: set[str], only: str) -> None:
    for case, candidates in TIMED.items():
        if only not in str(case):
            continue
        print(f"\n{case}")
        for event in _Child(timed, case, candidates).events(60.0):
            if event[0] == "timed":
                mark = " WRONG" if event[2] in wrong else ""
                name, spent, speed, host = event[2:]
                numbers = f"{spent * 1e3:9.1f} us {speed:7.1f} TFLOP/s, host {host:6.1f} us"
                print(f"  {name:22s}{numbers}{mark}")
            elif event[0] == "failed":
                print(f"  {event[2]:22s}{event[3]}")
            if event[0] != "start":
                results.append(event)


def main() -> None:
    """Compile, check, time, print tables and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--no-flashinfer", action="store_true")
    parser.add_argument("--only", default="", help="time only cases whose name contains this")
    options = parser.parse_args()
    started = time.perf_counter()
    results: list[tuple[Any, ...]] = []
    peers = importlib.util.find_spec("flashinfer") is not None and not options.no_flashinfer
    flashinfer = _Child(compile_flashinfer) if peers else None
    _compile_in_parallel(options.workers)
    print(f"compiled after {time.perf_counter() - started:.0f} s")
    wrong = _check_all(results)
    print(f"checked after {time.perf_counter() - started:.0f} s")
    if flashinfer is not None:
        for event in flashinfer.events(100.0):
            print("flashinfer", *event[1:])
    _time_all(results, wrong, options.only)
    print(f"\n{time.perf_counter() - started:.0f} s")
    target = Path(os.environ.get("OUT", ".")) / "triton_attention.json"
    target.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
