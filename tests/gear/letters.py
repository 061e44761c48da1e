"""A tiny llama and a tokenizer of made-up letters, for tests that generate text."""

from __future__ import annotations

from typing import Any

import mlx_lm

from evals import tiny

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(150)]


def make_model(head_dim: int = 64) -> Any:
    """Return a random llama of two layers whose next token depends on its cache."""
    return tiny.build(
        {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": head_dim, "vocab_size": 257, "seed": 0}
    )


class Letters:
    """What mlx-lm asks of a tokenizer: one letter a token, no end of text."""

    eos_token_id = None
    bos_token = None
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - 0x100 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(0x100 + i) for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {}

    def apply_chat_template(self) -> str:
        return ""


def generate(model: Any, max_tokens: int = 20) -> str:
    """Return the text that mlx-lm generates behind PROMPT."""
    letters: Any = Letters()
    return mlx_lm.generate(model, letters, prompt=PROMPT, max_tokens=max_tokens)
