"""Problems for AttendOut's game."""

from __future__ import annotations

from attn_reg_plugin.regularizers import Tokens
from tests.attention.tiny_model import PAD


class TokensOnly:
    """Names the encoder's tokens, under `key` of the inputs; a test that asks for a loss fails."""

    def __init__(self, key: str) -> None:
        self.key = key

    def loss(self, model, inputs):
        raise NotImplementedError

    validation = loss

    def tokens(self, inputs):
        ids = inputs[self.key]
        return {"encoder": Tokens(ids, ids.ne(PAD))}
