"""`attn-reg prepare`: a parallel corpus made ready for `fairseq-train`."""

from __future__ import annotations

import argparse

from attn_reg_plugin import configuration
from attn_reg_plugin.corpora.options import CORPORA

EXAMPLES = (
    "attn-reg prepare text --pair en-fr --source my_text --out data/en-fr",
    "attn-reg prepare wmt16 --pair en-ro --source hub --out data/en-ro",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The corpora and their options."""
    corpora = parser.add_subparsers(dest="corpus", required=True, metavar="CORPUS")
    for corpus, (options, summary) in CORPORA.items():
        configuration.add_arguments(corpora.add_parser(corpus, help=summary, description=summary), options)


def run(arguments: argparse.Namespace) -> int:
    """Prepare the corpus: 0 once that is done."""
    from attn_reg_plugin.corpora.preparation import prepare

    options, _ = CORPORA[arguments.corpus]
    prepare(configuration.from_arguments(options, arguments, f"prepare {arguments.corpus}"))
    return 0
