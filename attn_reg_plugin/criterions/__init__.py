"""fairseq criterions of the plugin; `tasks/__init__.py` imports them, so that `--user-dir` makes them known."""

from attn_reg_plugin.criterions import labelled

__all__ = ["labelled"]
