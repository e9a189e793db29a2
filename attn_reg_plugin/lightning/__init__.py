"""The Lightning face: one callback for a stock `lightning.Trainer` or `pytorch_lightning.Trainer`."""

from attn_reg_plugin.lightning.callback import LightningCallback

__all__ = ["LightningCallback"]
