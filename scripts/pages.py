"""Generated tables of the pages, each between `<!-- table NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping

PLACE = r"<!-- table ([\w ]+) -->.*?<!-- end -->"


def filled(page: str, tables: Mapping[str, str]) -> str:
    """A page's text with these tables in their places; other places stay as they are."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- table {name} -->\n\n{tables[name].strip()}\n\n<!-- end -->" if name in tables else match[0]

    return re.sub(PLACE, fill, page, flags=re.DOTALL)
