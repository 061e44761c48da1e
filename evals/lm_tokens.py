"""The tokenizer's side of lm-evaluation-harness's model interface: texts to tokens, chat templates.

Nothing is added to a text that was not asked for: no BOS by default, no special tokens.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


class Tokens:
    """What `evals.lm.CacheLM` does with texts; ``tokenizer`` is what `evals.models.load` returns.

    ``add_bos`` puts BOS in front of every text (None: as the tokenizer does by itself).
    """

    def __init__(self, tokenizer: Any, add_bos: bool | None) -> None:
        super().__init__()
        self.tokenizer: Any = tokenizer
        self._wrapped = getattr(tokenizer, "wrapped", tokenizer)
        self._add_bos = self._adds_bos() if add_bos is None else add_bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_options: Any
    ) -> list[int]:
        """Return the tokens of a text, behind BOS where that is asked for and not there yet."""
        tokens = self.tokenizer.encode(string)
        bos = self.tokenizer.bos_token_id
        add = self._add_bos if add_special_tokens is None else add_special_tokens
        return [bos, *tokens] if add and bos is not None and tokens[:1] != [bos] else tokens

    @property
    def eot_token_id(self) -> int:
        """Return the tokenizer's EOS id; ``ValueError`` where it has none."""
        return _first_id(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Return what stands for an empty context: BOS, else EOS; ``ValueError`` for neither."""
        return _first_id(self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Return a name that changes with the vocabulary's size or the chat template."""
        said = [getattr(self._wrapped, name, None) for name in ("vocab_size", "chat_template")]
        digest = hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()
        return f"{type(self._wrapped).__name__}-{digest[:12]}"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the messages as the model's chat template writes them.

        Without ``add_generation_prompt`` the last message is left open, to be gone on with.
        """
        if not getattr(self._wrapped, "has_chat_template", False):
            raise ValueError(
                "chat_template: this model's tokenizer has none; set eval.chat_template=false."
            )
        return self._wrapped.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    @property
    def eos_ids(self) -> list[int]:
        """Return every token that ends a text."""
        ids = getattr(self._wrapped, "eos_token_ids", None) or [self.tokenizer.eos_token_id]
        return [token for token in ids if token is not None]

    def _adds_bos(self) -> bool:
        """Say whether the tokenizer, left alone, begins a text with BOS."""
        bos = self.tokenizer.bos_token_id
        return bos is not None and self._wrapped.encode("a")[:1] == [bos]


def _first_id(*ids: int | None) -> int:
    """Return the first special token that is there."""
    found = next((token for token in ids if token is not None), None)
    if found is None:
        raise ValueError(
            "This tokenizer has no special token to stand for an empty context; use a model whose "
            "tokenizer has BOS or EOS."
        )
    return found
