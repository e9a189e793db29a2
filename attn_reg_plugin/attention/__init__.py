"""Seeing and masking attention: sites, masks, attributions and the one attention computation. Torch only."""

from attn_reg_plugin.attention.attribution import gradient_attribution
from attn_reg_plugin.attention.calls import recording
from attn_reg_plugin.attention.functional import regularized_attention
from attn_reg_plugin.attention.masks import candidate_region, drop_candidates
from attn_reg_plugin.attention.selection import SiteSelector, find_sites
from attn_reg_plugin.attention.sites import AttentionSite

__all__ = [
    "AttentionSite",
    "SiteSelector",
    "candidate_region",
    "drop_candidates",
    "find_sites",
    "gradient_attribution",
    "recording",
    "regularized_attention",
]
