"""fairseq modules of the plugin."""

from attn_reg_plugin.modules.multihead_attention import RegularizedMultiheadAttention

__all__ = ["RegularizedMultiheadAttention"]
