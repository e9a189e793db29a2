"""A Marian of Hugging Face's and the fairseq model that was made of it, asked for the same things."""

import copy
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor
from transformers import MarianMTModel

import attn_reg_plugin.models.opus_mt  # noqa: F401  registers the architecture
from attn_reg_plugin.opus_mt.conversion import CHECKPOINT, to_fairseq
from attn_reg_plugin.opus_mt.marian_folder import MarianFolder


class Sides:
    """Marian's and fairseq's models and vocabularies; of Marian's saved in `folder`, in `out` that of fairseq."""

    def __init__(self, marian: MarianMTModel, folder: Path, out: Path, length: int = 60, **overrides: Any) -> None:
        if not out.exists():
            to_fairseq(MarianFolder.open(folder), out)
        self.marian, self.length = copy.deepcopy(marian), length  # `balance` changes it, and others have it too
        settings = {"data": str(out), **overrides}
        models, _, self.task = checkpoint_utils.load_model_ensemble_and_task([str(out / CHECKPOINT)], settings)
        self.model = models[0].eval()
        from attn_reg_plugin.opus_mt.tokenization import OpusMTTokenizer

        self.text = OpusMTTokenizer(out)
        self.orders = [torch.tensor(side.vocabulary.order) for side in (self.text.source, self.text.target)]

    def balance(self, texts: list[str], size: int, share: float = 0.75, **options: Any) -> None:
        """Give `</s>` such a bias, in both models, that this share of translations ends before the longest length."""
        low, high = -4.0, 20.0
        for _ in range(8):
            middle = (low + high) / 2
            self.marian.final_logits_bias[0, self.marian.config.eos_token_id] = middle
            self.model.decoder.final_logits_bias[self.task.target_dictionary.eos()] = middle
            found = self.translations(texts, size, left=True, **options)
            ended = sum(len(row) < self.length - 1 for row in found) / len(found)
            if abs(ended - share) < 0.05:
                return
            low, high = (low, middle) if ended > share else (middle, high)

    def to_fairseq(self, ids: Tensor, side: int = 0) -> Tensor:
        """Marian's numbers as fairseq's."""
        return self.orders[side].argsort()[ids] + 1

    def to_marian(self, ids: Tensor, side: int = 1) -> Tensor:
        """fairseq's numbers as Marian's."""
        return self.orders[side][ids - 1]

    def sources(self, texts: list[str]) -> list[Tensor]:
        """fairseq's numbers of source sentences."""
        encode = self.task.source_dictionary.encode_line
        return [encode(" ".join(self.text.source.encode(t)), add_if_not_exist=False).long() for t in texts]

    def batch(self, rows: list[Tensor], left: bool) -> Tensor:
        """fairseq's numbers (B, S), padded on one side."""
        pad, width = self.task.source_dictionary.pad(), max(map(len, rows))
        padded = [(torch.full((width - len(row),), pad), row)[:: 1 if left else -1] for row in rows]
        return torch.stack([torch.cat(pair) for pair in padded])

    @torch.no_grad()
    def encoded(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder outputs (B, S, C) of tokens (B, S) by fairseq and by Hugging Face."""
        mask = tokens.ne(self.task.source_dictionary.pad())
        ours = self.model.encoder(tokens)["encoder_out"][0].transpose(0, 1)
        encoder = self.marian.get_encoder()
        return ours, encoder(self.to_marian(tokens, 0), attention_mask=mask.long()).last_hidden_state

    @torch.no_grad()
    def logits(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher-forced logits (B, T, V) in Marian's order for targets (B, T) of fairseq's numbers."""
        mask = tokens.ne(self.task.source_dictionary.pad())
        end = self.task.target_dictionary.eos()
        previous = torch.cat([torch.full_like(targets[:, :1], end), targets[:, :-1]], dim=1)
        ours = self.model(tokens, None, previous)[0]
        theirs = self.marian(
            self.to_marian(tokens, 0), attention_mask=mask.long(), labels=self.to_marian(targets)
        ).logits
        return ours[..., 1:][..., self.orders[1].argsort()], theirs

    @torch.no_grad()
    def translations(self, texts: list[str], size: int, left: bool, **options: Any) -> list[list[int]]:
        """fairseq's beam search, batch by batch, as Marian's numbers with the end of sentence."""
        options = {"max_len_b": self.length - 2, "min_len": 0} | options
        generator = SequenceGenerator([self.model], self.task.target_dictionary, **options)
        found = []
        for start in range(0, len(texts), size):
            tokens = self.batch(self.sources(texts[start : start + size]), left)
            sample = {"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(generator.pad).sum(1)}}
            found += [self.to_marian(hypotheses[0]["tokens"]).tolist() for hypotheses in generator.generate([], sample)]
        return found

    @torch.no_grad()
    def generated(self, tokenizer: Any, texts: list[str], size: int, **options: Any) -> list[list[int]]:
        """Hugging Face's beam search, batch by batch, without its start and its padding."""
        pad, found = self.marian.config.pad_token_id, []
        for start in range(0, len(texts), size):
            inputs = tokenizer(texts[start : start + size], return_tensors="pt", padding=True)
            rows = self.marian.generate(**inputs, max_length=self.length, do_sample=False, **options).tolist()
            found += [[number for number in row[1:] if number != pad] for row in rows]
        return found
