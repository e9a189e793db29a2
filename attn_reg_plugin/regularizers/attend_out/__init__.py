"""AttendOut (Wu, Zhao & Zhang 2021): a generator learns which attention to drop from a duel of two copies."""

from attn_reg_plugin.regularizers.attend_out.attend_out import AttendOut

__all__ = ["AttendOut"]
