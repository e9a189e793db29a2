"""The methods, one file each, and what they share. Torch only."""

from attn_reg_plugin.regularizers.ad_drop import ADDrop
from attn_reg_plugin.regularizers.base import REGISTRY, Outcome, Problem, Regularizer, build, options_of

__all__ = ["REGISTRY", "ADDrop", "Outcome", "Problem", "Regularizer", "build", "options_of"]
