"""Measures one way to generate: decode steps, prompts, and swaps in the middle of a text."""

from __future__ import annotations

import functools
import gc
import statistics
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import _measure
from benchmarks._generation_swap import swapped
from benchmarks._generators import PAGE, Eager, Generator, Paged, build
from benchmarks._measure import steps_ms, timed
from torch_ops.demo.session import backends

__all__ = ["Bench", "Job", "Load"]

WARM_UP = 4  # steps: compile, warm up, record, replay
SWAP_STEPS = 8  # of each of its texts; not every backend is fast
TURNS = 3  # of a prompt whose rate is measured
LEAST_CHUNK = 128
_Row = dict[str, Any]


class Load(NamedTuple):
    """So many sequences of so many tokens."""

    batch: int
    length: int


@dataclass(frozen=True)
class Job:
    """A row to measure.

    Attributes:
        kind: ``"decode"``, ``"prefill"`` or ``"swap"``.
        workload: Its name.
        load: Its size.
        name: The candidate's.
        candidate: Who generates.
        prefill: Whether prompts are compiled.
    """

    kind: str
    workload: str
    load: Load
    name: str
    candidate: type[Generator]
    prefill: bool = False

    def __str__(self) -> str:
        return f"{self.workload}, {self.name}"


class Bench:
    """A model, and what is common to all rows.

    Args:
        sizes: Of the model's config.
        device: Where it runs.
        steps: Decode steps that are timed.
        attention: Backend of our attention.
        swap_to: Backend to swap to.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        device: torch.device,
        steps: int,
        attention: str | None = None,
        swap_to: str | None = None,
    ) -> None:
        self.device, self.steps = device, steps
        self._attention, self._swap_to = attention, swap_to
        self.copy_tb_s = _measure.copy_rate(device)
        self.model = build(sizes, device)
        self._expected: dict[str, Tensor] = {}

    def measure(self, job: Job) -> _Row:
        """Give a row; one that fails says why instead."""
        row: _Row = {"workload": job.workload, "candidate": job.name, **job.load._asdict()}
        measured = {"decode": self._decode, "prefill": self._prefill, "swap": self._swap}[job.kind]
        try:
            row |= measured(job)
        except Exception as error:  # a candidate that fails is a result
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self._clean()
        return row

    def _decode(self, job: Job) -> _Row:
        """Time the first token and decode steps."""
        batch, length = job.load
        with closing(self._generator(job, length + WARM_UP + self.steps)) as generator:
            ids, tokens = self._ids(job.load), self._ids(Load(batch, WARM_UP + self.steps))
            _, chunk = self._prompt(generator, ids)
            generator.start()
            first, _ = timed(lambda: generator.prompt(ids, chunk).argmax(-1), self.device)
            columns = list(tokens.split(1, 1))
            compile_ms, _ = timed(lambda: generator.step(columns[0]), self.device)
            for column in columns[1:WARM_UP]:
                generator.step(column)
            ms, logits = steps_ms(generator.step, columns[WARM_UP:], self.device)
            middle = statistics.median(ms)
            floor = self._floor_ms(batch, length + WARM_UP + self.steps / 2)
            return {
                "ms": round(middle, 4), "low_ms": round(min(ms), 4), "high_ms": round(max(ms), 4),
                "floor_ms": round(floor, 4), "ratio": round(middle / floor, 4),
                "first_token_ms": round(first, 3), "chunk": chunk,
                "first_step_s": round(compile_ms / 1e3, 2),
                **self._compared(job, logits), **self._facts(generator),
            }  # fmt: skip

    def _prefill(self, job: Job) -> _Row:
        """Time a prompt."""
        with closing(self._generator(job, job.load.length)) as generator:
            ids = self._ids(job.load)
            logits, chunk = self._prompt(generator, ids)
            times = []
            for _ in range(TURNS):
                generator.start()
                ms, logits = timed(functools.partial(generator.prompt, ids, chunk), self.device)
                times.append(ms)
            ms = statistics.median(times)
            rate = self._prompt_flops(*job.load) / ms / 1e9
            return {
                "ms": round(ms, 3), "low_ms": round(min(times), 3),
                "high_ms": round(max(times), 3), "tflop_s": float(f"{rate:.4g}"), "chunk": chunk,
                **self._compared(job, logits), **self._facts(generator),
            }  # fmt: skip

    def _swap(self, job: Job) -> _Row:
        """Swap attention in the middle of a text."""
        longest = job.load.length + WARM_UP + self.steps
        with closing(self._generator(job, longest)) as generator:
            assert isinstance(generator, Paged)
            generator.start()
            last = generator.prompt(self._ids(job.load), job.load.length).argmax(-1)
            for _ in range(WARM_UP):
                last = generator.step(last[:, None]).argmax(-1)
            steps = min(self.steps, SWAP_STEPS)
            return swapped(generator, last, steps, self._swap_to) | self._facts(generator)

    def _generator(self, job: Job, longest: int) -> Generator:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        longest = -(-longest // PAGE) * PAGE  # of others the masks of static slots lie unaligned
        options: dict[str, Any] = {"prefill": job.prefill, "attention": self._attention}
        return job.candidate(self.model, job.load.batch, longest, **options)

    def _prompt(self, generator: Generator, ids: Tensor) -> tuple[Tensor, int]:
        """Run a prompt for the first time, in chunks that fit; gives their length, too."""
        chunk = ids.shape[1]
        while True:
            generator.start()
            try:
                return generator.prompt(ids, chunk), chunk
            except torch.OutOfMemoryError:
                if chunk <= LEAST_CHUNK:
                    raise
            chunk = -(-chunk // 2)
            self._free()

    def _ids(self, load: Load) -> Tensor:
        seeded = torch.Generator().manual_seed(load.length)
        size = (load.batch, load.length)
        ids = torch.randint(self.model.config.vocab_size, size, generator=seeded)
        return ids.to(self.device)

    def _compared(self, job: Job, logits: Tensor) -> _Row:
        """Say how far logits are from eager transformers', over the largest of those."""
        logits = logits.float().cpu()
        if job.candidate is Eager:
            self._expected[job.workload] = logits
        expected = self._expected.get(job.workload)
        if expected is None:  # it failed
            return {}
        return {"difference": float((logits - expected).abs().max() / expected.abs().max())}

    def _facts(self, generator: Generator) -> _Row:
        row: _Row = {"copy_tb_s": round(self.copy_tb_s, 3)}
        if isinstance(generator, Paged):
            row["attention"] = ", ".join(sorted(set(backends(self.model).values())))
        if self.device.type == "cuda":
            row["peak_gib"] = round(torch.cuda.max_memory_allocated(self.device) / 2**30, 2)
        return row

    def _floor_ms(self, batch: int, length: float) -> float:
        """Give the time of reading the weights and so many keys and values once."""
        config = self.model.config
        embeddings = self.model.get_input_embeddings().weight
        weights = sum(p.nbytes for p in self.model.parameters()) - embeddings.nbytes
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        kv = token * embeddings.itemsize * batch * length
        return float((weights + kv) / self.copy_tb_s / 1e9)

    def _prompt_flops(self, batch: int, length: int) -> float:
        """Count products, of the last tokens alone in the output layer, and visible pairs."""
        config = self.model.config
        layers = [p for p in self.model.model.layers.parameters() if p.dim() == 2]
        products = 2 * sum(p.numel() for p in layers) * batch * length
        output = 2 * config.vocab_size * config.hidden_size * batch
        pairs = batch * length * (length + 1) / 2 * config.num_hidden_layers
        attention = 4 * config.num_attention_heads * config.head_dim * pairs
        return float(products + output + attention)

    def _clean(self) -> None:
        torch.compiler.reset()
        self._free()

    def _free(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
