"""Small tokenizers with the machinery of BERT's, which may drop a word whole."""

from collections.abc import Sequence

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
PIECES = [*SPECIAL, *["a", "cat", "dog", "sleep", "##s", "##ing", "the", "un", "##want", "##ed", ".", "runs"]]


def bert_tokenizer(pieces: Sequence[str] = PIECES, **options: object) -> PreTrainedTokenizerFast:
    """WordPiece with `[CLS] first [SEP] second [SEP]` and token types; control characters vanish."""
    tokenizer = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**names, **options})
