"""A phrasebook in English, Romanian and Turkish, made by grammar: a corpus that fits in no download.

Articles, genders, cases, vowel harmony and word order are real and the sentences are distinct, so a small
Transformer has something to learn, over-fits on little of it, and is tested on unseen combinations.
"""

from attn_reg_plugin.data.phrasebook.corpus import MAX_SENTENCES, sentences, splits, write_phrasebook
from attn_reg_plugin.data.phrasebook.grammar import Triple

__all__ = ["MAX_SENTENCES", "Triple", "sentences", "splits", "write_phrasebook"]
