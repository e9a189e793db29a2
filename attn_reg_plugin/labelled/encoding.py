"""From examples to ids, with the model's own tokenizer.

Nothing is padded here: batches are padded to their own longest when they are made. Long inputs are truncated at the
model's length (of a pair, the longer text first), and said once a data set: how many of how many.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from attn_reg_plugin.files import reason_of
from attn_reg_plugin.labelled.examples import ChoiceExample, Example, TaggedSentence, TextExample
from attn_reg_plugin.labelled.task_table import TAGGING, LabelledTask
from attn_reg_plugin.regularizers.base.outputs import IGNORED

logger = logging.getLogger(__name__)

#: how many examples are given to the tokenizer at once
_CHUNK = 1000
#: families whose first position is the padding index + 1, so that many positions fewer hold tokens
_OFFSET_POSITIONS = (
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
#: tokenizers that know no limit say a number beyond this one
_NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class Encoded:
    """One example for the model.

    Attributes:
        input_ids: int32 (T,); of multiple choice a tuple with one (T of its own,) a choice.
        token_type_ids: of the same shape, or None where the tokenizer gives none.
        label: class index, value, or int32 (T,) with -100 where a position has no label; None without labels.
    """

    input_ids: np.ndarray | tuple[np.ndarray, ...]
    token_type_ids: np.ndarray | tuple[np.ndarray, ...] | None
    label: int | float | np.ndarray | None


def load_tokenizer(path: str, task: LabelledTask) -> Any:
    """Load the fast tokenizer of a model, a folder or a hub name; of tagging one that parts words.

    Raises:
        ValueError: it cannot be loaded, or it is not a fast one.
    """
    from transformers import AutoTokenizer

    spaced = {"add_prefix_space": True} if task.kind == TAGGING else {}  # which some families want to be given words
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **spaced)
    except Exception as error:  # of a damaged file any
        raise ValueError(f"the tokenizer of {path} could not be loaded ({reason_of(error)})") from error
    if not tokenizer.is_fast:
        raise ValueError(f"{path} has {type(tokenizer).__name__}, a slow tokenizer; a fast one is needed")
    return tokenizer


def longest_input(tokenizer: Any, config: Any, wanted: int | None = None) -> int:
    """Find how many tokens the model takes, special ones included: `wanted`, or what tokenizer and configuration allow.

    Raises:
        ValueError: neither says a limit and none was asked for; or more was asked for than the model takes, or less
            than room for the special tokens and one more.
    """
    limits = [int(tokenizer.model_max_length)] if tokenizer.model_max_length < _NO_LIMIT else []
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions > 0:
        unused = config.pad_token_id + 1 if config.model_type in _OFFSET_POSITIONS else 0
        limits.append(int(positions) - unused)
    if wanted is None:
        if not limits:
            raise ValueError(f"neither the tokenizer nor the {config.model_type} model says how long an input may be")
        return min(limits)
    least = tokenizer.num_special_tokens_to_add(pair=True) + 1
    if wanted < least or (limits and wanted > min(limits)):
        most = f" and at most {min(limits)}" if limits else ""
        raise ValueError(f"inputs of {wanted} tokens were asked for, but the length must be at least {least}{most}")
    return wanted


def encode(
    examples: Sequence[Example], task: LabelledTask, tokenizer: Any, longest: int, title: str = ""
) -> list[Encoded]:
    """Turn examples into ids, truncated to `longest` tokens; the log says once how many were, with the data's title."""
    one = {TaggedSentence: _encode_tagged, ChoiceExample: _encode_choices, TextExample: _encode_texts}
    encoded: list[Encoded] = []
    truncated = 0
    for start in range(0, len(examples), _CHUNK):
        chunk = examples[start : start + _CHUNK]
        for row, too_long in one[type(chunk[0])](chunk, tokenizer, longest):
            encoded.append(row)
            truncated += too_long
    if truncated:
        logger.warning(
            f"{title or task.name}: {truncated} of {len(examples)} examples were truncated at {longest} tokens"
        )
    return encoded


def _columns(batch: Any) -> tuple[list[np.ndarray], list[np.ndarray] | list[None], list[bool]]:
    """Get ids, token types (or Nones) and whether anything was cut off, of each input."""
    ids = [np.asarray(row, dtype=np.int32) for row in batch["input_ids"]]
    types = [np.asarray(row, dtype=np.int32) for row in batch["token_type_ids"]] if "token_type_ids" in batch else []
    return ids, types or [None] * len(ids), [bool(encoding.overflowing) for encoding in batch.encodings]


def _encode_texts(chunk: Sequence[TextExample], tokenizer: Any, longest: int) -> Iterator[tuple[Encoded, bool]]:
    texts = [[example.first for example in chunk]]
    if chunk[0].second is not None:
        texts.append([example.second for example in chunk])
    batch = tokenizer(*texts, truncation=True, max_length=longest)
    for example, ids, types, too_long in zip(chunk, *_columns(batch), strict=True):
        yield Encoded(ids, types, example.label), too_long


def _encode_choices(chunk: Sequence[ChoiceExample], tokenizer: Any, longest: int) -> Iterator[tuple[Encoded, bool]]:
    contexts = [example.context for example in chunk for _ in example.endings]
    endings = [ending for example in chunk for ending in example.endings]
    rows = zip(*_columns(tokenizer(contexts, endings, truncation=True, max_length=longest)), strict=True)
    for example in chunk:
        ids, types, too_long = zip(*islice(rows, len(example.endings)), strict=True)
        yield Encoded(ids, None if types[0] is None else types, example.label), any(too_long)


def _encode_tagged(chunk: Sequence[TaggedSentence], tokenizer: Any, longest: int) -> Iterator[tuple[Encoded, bool]]:
    # a word's pieces are those that it has in a text: after a space, which some tokenizers put there themselves
    space = " " * (len(tokenizer.tokenize(" a")) <= len(tokenizer.tokenize("a")))
    words = [[space + word for word in example.words] for example in chunk]
    options = {"truncation": True, "max_length": longest}
    batch = tokenizer(words, is_split_into_words=True, **options)
    empty = []
    for row, encoding in enumerate(batch.encodings):
        found = {word for part in (encoding, *encoding.overflowing) for word in part.word_ids}
        empty += [(row, word) for word in range(len(words[row])) if word not in found]
    if empty:  # such a word is in the sentence and in the metric, so it has to have a position
        for row, word in empty:
            words[row][word] = tokenizer.unk_token
        batch = tokenizer(words, is_split_into_words=True, **options)
    for row, (example, ids, types, too_long) in enumerate(zip(chunk, *_columns(batch), strict=True)):
        yield Encoded(ids, types, _first_pieces(batch.word_ids(row), example.labels)), too_long


def _first_pieces(word_of: Sequence[int | None], labels: Sequence[int] | None) -> np.ndarray | None:
    """Align labels (T,): each word's at its first sub-token, -100 elsewhere."""
    if labels is None:
        return None
    aligned = np.full(len(word_of), IGNORED, dtype=np.int32)
    last = None
    for position, word in enumerate(word_of):
        if word is not None and word != last:
            aligned[position] = labels[word]
        last = word
    return aligned
