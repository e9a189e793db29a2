"""Labelled data for encoders: readers of the official formats, a table of tasks, and encoding for a model.

Importing this needs numpy, and transformers or datasets only once they are used. `dataset.py`, which is not imported
here, makes a fairseq dataset of the rows.
"""

# ruff: noqa: F401  the names are the room's
from attn_reg_plugin.labelled.corruption import AT_EVALUATION, Corruption
from attn_reg_plugin.labelled.encoding import Encoded, encode, load_tokenizer, longest_input
from attn_reg_plugin.labelled.examples import ChoiceExample, Example, TaggedSentence, TextExample
from attn_reg_plugin.labelled.reading import find_split, is_hub, read_file, read_split, with_labels
from attn_reg_plugin.labelled.sampling import Sampling, sample_of
from attn_reg_plugin.labelled.task_table import (
    CLASSIFICATION,
    KINDS,
    MULTIPLE_CHOICE,
    REGRESSION,
    TAGGING,
    TASKS,
    LabelledTask,
    find_task,
    own_task,
)
