"""The methods, a file or a folder each, and what they share in `base`. Torch only.

Every file and folder here is imported, so that a method registers itself by being there.
"""

import importlib
import pkgutil

from attn_reg_plugin.regularizers.ad_drop import ADDrop
from attn_reg_plugin.regularizers.attend_out import AttendOut
from attn_reg_plugin.regularizers.attend_out.generator import Tokens
from attn_reg_plugin.regularizers.attention_dropout import AttentionDropout
from attn_reg_plugin.regularizers.attention_layer_drop import AttentionLayerDrop
from attn_reg_plugin.regularizers.base import REGISTRY, Regularizer, build
from attn_reg_plugin.regularizers.base.combination import Combination
from attn_reg_plugin.regularizers.base.context import Outcome, Problem, Supplied, Training
from attn_reg_plugin.regularizers.base.options import options_of
from attn_reg_plugin.regularizers.base.registry import attach
from attn_reg_plugin.regularizers.base.regularizer import option_flag
from attn_reg_plugin.regularizers.head_drop import HeadDrop
from attn_reg_plugin.regularizers.hidden_cut import HiddenCut
from attn_reg_plugin.regularizers.layer_drop import LayerDrop
from attn_reg_plugin.regularizers.r_drop import RDrop
from attn_reg_plugin.regularizers.scheduled_dropout import ScheduledDropout

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "REGISTRY",
    "ADDrop",
    "AttendOut",
    "AttentionDropout",
    "AttentionLayerDrop",
    "Combination",
    "HeadDrop",
    "HiddenCut",
    "LayerDrop",
    "Outcome",
    "Problem",
    "RDrop",
    "Regularizer",
    "ScheduledDropout",
    "Supplied",
    "Tokens",
    "Training",
    "attach",
    "build",
    "option_flag",
    "options_of",
]
