"""The methods, one file each, and what they share. Torch only."""

from attn_reg_plugin.regularizers.ad_drop import ADDrop
from attn_reg_plugin.regularizers.attend_out import AttendOut
from attn_reg_plugin.regularizers.attention_layer_drop import AttentionLayerDrop
from attn_reg_plugin.regularizers.base import REGISTRY, Outcome, Problem, Regularizer, build
from attn_reg_plugin.regularizers.generator import Tokens
from attn_reg_plugin.regularizers.options import options_of
from attn_reg_plugin.regularizers.scheduled_dropout import ScheduledDropout

__all__ = [
    "REGISTRY",
    "ADDrop",
    "AttendOut",
    "AttentionLayerDrop",
    "Outcome",
    "Problem",
    "Regularizer",
    "ScheduledDropout",
    "Tokens",
    "build",
    "options_of",
]
