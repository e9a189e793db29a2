"""Imported by the server that the tests' processes are forked from: what they would import one after the other.

Nothing of the plugin: a command finds it as a user's does, by `--user-dir`. What is imported is frozen for the garbage
collector, which would otherwise search all of it in every process.
"""

import contextlib
import gc
import importlib

for name in (
    *("fairseq_cli.train", "fairseq_cli.generate", "fairseq_cli.preprocess", "torch._dynamo", "sacrebleu"),
    *("transformers.trainer", "transformers.models.bert.modeling_bert", "accelerate"),
    *("sklearn.metrics", "scipy.stats", "seqeval.metrics"),
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.collect()
gc.freeze()
