"""AD-DROP: attribution-driven dropout (Yang et al., NeurIPS 2022)."""

from attn_reg_plugin.regularizers.ad_drop.ad_drop import ADDrop

__all__ = ["ADDrop"]
