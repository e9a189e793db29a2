"""The methods, one file each, and what they share. Torch only.

Every file of this folder is imported, so that a method registers itself by being there.
"""

import importlib
import pkgutil

from attn_reg_plugin.regularizers.ad_drop import ADDrop
from attn_reg_plugin.regularizers.attend_out import AttendOut
from attn_reg_plugin.regularizers.attention_layer_drop import AttentionLayerDrop
from attn_reg_plugin.regularizers.base import REGISTRY, Regularizer, build
from attn_reg_plugin.regularizers.combination import Combination
from attn_reg_plugin.regularizers.generator import Tokens
from attn_reg_plugin.regularizers.options import options_of
from attn_reg_plugin.regularizers.scheduled_dropout import ScheduledDropout
from attn_reg_plugin.regularizers.sharded_state import ShardedState
from attn_reg_plugin.regularizers.training import Outcome, Problem, Supplied, Training

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "REGISTRY",
    "ADDrop",
    "AttendOut",
    "AttentionLayerDrop",
    "Combination",
    "Outcome",
    "Problem",
    "Regularizer",
    "ScheduledDropout",
    "ShardedState",
    "Supplied",
    "Tokens",
    "Training",
    "build",
    "options_of",
]
