"""fairseq criterions of the plugin; `tasks/__init__.py` imports them, so that `--user-dir` makes them known."""

from attn_reg_plugin.criterions import classification, label_smoothed_cross_entropy_with_r_drop, tagging

__all__ = ["classification", "label_smoothed_cross_entropy_with_r_drop", "tagging"]
