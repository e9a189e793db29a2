"""Small tokenizers with the machinery of the real ones: BERT's, which may drop a word whole, and RoBERTa's."""

from __future__ import annotations

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_WORDS = "a cat dog sleep ##s ##ing the un ##want ##ed . runs"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_WORDS.split()]


def bert_tokenizer(**options: object) -> PreTrainedTokenizerFast:
    """WordPiece with `[CLS] first [SEP] second [SEP]` and token types; control characters vanish."""
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**names, **options})
