"""Ways to generate with one model of transformers: its own, eager and compiled, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from torch_ops.integrations.transformers import accelerate
from torch_ops.integrations.transformers.cache import argument
from torch_ops.integrations.transformers.paged import PagedCache

PAGE = 16
DTYPE = torch.bfloat16


def build(sizes: dict[str, Any], device: torch.device) -> Any:
    """Make a Llama of random weights where it runs."""
    config = LlamaConfig(**sizes, tie_word_embeddings=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def compiled(
    call: Callable[..., Any], *, graphs: bool = True, whole: bool = True
) -> Callable[..., Any]:
    """Compile for one shape; with CUDA graphs, where there are some, and without graph breaks."""
    mode = "reduce-overhead" if graphs else "default"
    made: Callable[..., Any] = torch.compile(call, mode=mode, dynamic=False, fullgraph=whole)
    return made


class Generator:
    """A model with a cache for some sequences of one length.

    Args:
        model: Of transformers; `close` leaves it as it was.
        batch: Sequences.
        longest: Most tokens of each.
        prefill: Whether prompts run compiled, too.
        attention: Backend of our attention; None for what torch_ops chooses.
    """

    name: ClassVar[str]

    def __init__(
        self,
        model: Any,
        batch: int,
        longest: int,
        *,
        prefill: bool = False,
        attention: str | None = None,
    ) -> None:
        self.model, self.batch, self.longest = model, batch, longest
        self.cache: Any = None
        self._cache_name = argument(model)
        self._prefill = compiled(model, graphs=False) if prefill else model
        self._decode: Callable[..., Any] = model

    def start(self) -> None:
        """Forget all tokens."""
        raise NotImplementedError

    def prompt(self, ids: Tensor, chunk: int) -> Tensor:
        """Take prompts ``[B, S]``, so many columns at once, and give the last logits ``[B, V]``."""
        for part in ids.split(chunk, 1):
            logits = self._run(self._prefill, part)
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Take a token of each sequence, ``[B, 1]``, and give the logits ``[B, V]``."""
        return self._run(self._decode, tokens)

    def close(self) -> None:
        """Let go of the cache, and of what was done to the model."""
        self.cache = None

    def _run(self, call: Callable[..., Any], ids: Tensor) -> Tensor:
        caches = {self._cache_name: self.cache}
        out = call(input_ids=ids, use_cache=True, logits_to_keep=1, **caches)
        logits: Tensor = out.logits
        return logits[:, -1]


class Eager(Generator):
    """transformers as it is, with the cache that grows by concatenation."""

    name = "transformers eager"

    def start(self) -> None:
        """Take an empty cache."""
        self.cache = DynamicCache(config=self.model.config)


class Static(Generator):
    """transformers' own way to compile: slots for all tokens, looked at through a mask.

    Prompts run eager, as in its ``generate()``.
    """

    name = "transformers compiled"

    def __init__(self, model: Any, batch: int, longest: int, **options: Any) -> None:
        super().__init__(model, batch, longest, **options)
        self._decode = compiled(model, whole=False)  # as transformers' CompileConfig has it
        self.cache = StaticCache(config=model.config, max_cache_len=longest)
        # It allocates at its first tokens, which no compiled code may be.
        self._run(model, torch.zeros(batch, 1, dtype=torch.int64, device=model.device))

    def start(self) -> None:
        """Empty the slots."""
        self.cache.reset()


class Paged(Generator):
    """The model accelerated, with a paged cache that is planned before each step."""

    name = "ours"

    def __init__(self, model: Any, batch: int, longest: int, **options: Any) -> None:
        self.report = accelerate(model, attention=options.get("attention"))
        try:
            super().__init__(model, batch, longest, **options)
            self._decode = compiled(model)
            pages = batch * -(-longest // PAGE)
            where = {"dtype": DTYPE, "device": model.device}
            self.cache = PagedCache(model.config, pages, page_size=PAGE, **where)
        except BaseException:
            self.report.undo()
            raise
        self.sequences: list[int] = []

    def start(self) -> None:
        """Free all pages and open sequences."""
        self.cache.reset()
        self.sequences = [self.cache.open() for _ in range(self.batch)]

    def lengths(self) -> list[int]:
        """Give how many tokens each sequence has."""
        return [self.cache.length(sequence) for sequence in self.sequences]

    def rewind(self, lengths: list[int]) -> None:
        """Forget what is behind these lengths."""
        for sequence, length in zip(self.sequences, lengths, strict=True):
            self.cache.cut(sequence, length)

    def close(self) -> None:
        """Put the model back, too."""
        super().close()
        self.report.undo()

    def _run(self, call: Callable[..., Any], ids: Tensor) -> Tensor:
        self.cache.plan(self.sequences, [ids.shape[1]] * self.batch)
        return super()._run(call, ids)
