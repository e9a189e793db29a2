"""AD-DROP as the commands compare it: as it is, and the ablations of Yang et al. 2022 by name."""

from __future__ import annotations

from attn_reg_plugin.regularizers.base import Preset

BASE = {"p": 0.3, "q": 0.3, "sites": "encoder.self", "cross_tuning": "epoch"}

#: each changes one thing
PRESETS: tuple[Preset, ...] = (
    Preset("ad_drop", "AD-DROP", BASE),
    Preset("ad_drop_kept", "AD-DROP, kept probe", {**BASE, "probe": "kept"}),
    Preset("ad_drop_ga", "AD-DROP, gradient attribution", {**BASE, "attribution": "gradient"}),
    Preset("ad_drop_iga", "AD-DROP, integrated gradients", {**BASE, "attribution": "integrated"}),
    Preset("ad_drop_aa", "AD-DROP, attention as attribution", {**BASE, "attribution": "attention"}),
    Preset("ad_drop_rd", "AD-DROP, random candidates", {**BASE, "attribution": "random"}),
    Preset("ad_drop_gold", "AD-DROP, gold labels", {**BASE, "labels": "gold"}),
    Preset("ad_drop_low", "AD-DROP, lowest attributions", {**BASE, "direction": "low"}),
    Preset("ad_drop_first_layer", "AD-DROP, first layer", {**BASE, "sites": "encoder.self[0]"}),
    Preset("ad_drop_without_cross_tuning", "AD-DROP without cross-tuning", {**BASE, "cross_tuning": "off"}),
)
