"""The Hugging Face face: one callback for a stock `transformers.Trainer` or `Seq2SeqTrainer`."""

from attn_reg_plugin.huggingface.callback import AttnRegCallback

__all__ = ["AttnRegCallback"]
