"""Repairs of fairseq itself; importing the plugin's tasks puts them in place."""

from attn_reg_plugin.tasks.fairseq_fixes import patches as _patches

del _patches
