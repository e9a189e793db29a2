"""Base of the methods: their class, options, registry, statistics, and the hooks on a model."""

from attn_reg_plugin.regularizers.base.options import option
from attn_reg_plugin.regularizers.base.registry import REGISTRY, Preset, build, register
from attn_reg_plugin.regularizers.base.regularizer import Draw, Regularizer, Share

__all__ = ["REGISTRY", "Draw", "Preset", "Regularizer", "Share", "build", "option", "register"]
