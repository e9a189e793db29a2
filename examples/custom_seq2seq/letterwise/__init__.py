"""A fairseq user dir of a user's own: `--user-dir examples/custom_seq2seq/letterwise`."""

from . import letter_model, letter_task, regularized  # noqa: F401
