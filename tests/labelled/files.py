"""Files of labelled data, written by hand."""

import gzip
from pathlib import Path

SWAG_HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3"
RTE = "index\tsentence1\tsentence2\tlabel\n"
CONLLU = "1\tI\tI\tPRON\tPRP\t_\t2\tnsubj\t_\t_\n"


def write(path: Path, content: str | bytes) -> Path:
    """The file, with its folder; compressed if its name ends in .gz."""
    data = content if isinstance(content, bytes) else content.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
