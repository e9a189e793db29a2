"""Refusals before training: what fairseq cannot do, and models and tasks that a method cannot work with."""

import importlib.util
from typing import Any

from fairseq.models import FairseqMultiModel
from torch import nn

from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.regularizers import Regularizer
from attn_reg_plugin.tasks.fairseq_settings import FAIRSEQ_SETTINGS, fairseq_setting
from attn_reg_plugin.tasks.predictions import NEED_NO_PREDICTION, reads_predictions

#: models (by the name of their class, or of one they derive from) whose outputs hold no prediction to attribute
WITHOUT_PREDICTION = {
    "Wav2Vec2Model": "a contrastive loss over quantized sounds",
    "HubertModel": "a loss over masked stretches of sound",
    "TTSTransformerModel": "a spectrogram",
    "FastSpeech2Model": "a spectrogram",
    "Tacotron2Model": "a spectrogram",
    "S2STransformerMultitaskModelBase": "a spectrogram or units, and the outputs of several tasks",
    "SpeechDLM": "units of two channels, and their durations",
}


def refuse_settings(config: Any, regularizer: Regularizer | None) -> None:
    """Refuse a precision that fairseq itself cannot train in, before it fails in a way that does not say so.

    And parameters that fairscale shards: it frees them at the end of every backward, the probe's as well.
    """
    on = {name: str(fairseq_setting(config, name)) == "True" for name, _ in FAIRSEQ_SETTINGS}
    if on["tpu"] and importlib.util.find_spec("torch_xla") is None:
        raise ValueError(
            "--bf16 and --memory-efficient-bf16 make fairseq's command line ask for a TPU, and torch_xla is not "
            "installed; use --amp, or fairseq-hydra-train with common.bf16=true"
        )
    if on["cpu"] and on["fp16"] and not (on["memory_efficient_fp16"] or on["fp16_no_flatten_grads"]):
        raise ValueError(
            "--fp16 with --cpu fails in fairseq, whose fp32 copy of the weights is made on a GPU; add "
            "--memory-efficient-fp16 or --fp16-no-flatten-grads, or use --amp"
        )
    if regularizer is not None and fairseq_setting(config, "ddp_backend") == "fully_sharded":
        raise ValueError(
            f"--ddp-backend fully_sharded shards parameters by fairscale, in which --attn-reg {regularizer.name} "
            "cannot act; use --ddp-backend legacy_ddp or pytorch_ddp"
        )


def refuse_model(regularizer: Regularizer, model: nn.Module, task: str) -> None:
    """Refuse a model that the method cannot work with.

    Any needs one model, AttendOut batches of source and target tokens, methods that compare passes a distribution, and
    those that attribute predictions a model that makes some.
    """
    kind, method = f"{type(model).__name__} of {task}", f"--attn-reg {regularizer.name}"
    classes = [cls.__name__ for cls in type(model).__mro__]
    if isinstance(model, FairseqMultiModel):
        raise ValueError(f"{kind} is a model for each pair; make a task of your own of translation_multi_simple_epoch")
    if regularizer.one_forward and "FairseqNATModel" in classes:
        raise ValueError(
            f"{method} does not work with {kind}, whose tokens have noise of the task's own; use another --attn-reg, "
            "such as ad_drop or scheduled_dropout"
        )
    softmax = getattr(getattr(model, "decoder", None), "adaptive_softmax", None)
    if regularizer.passes > 1 and softmax is not None:
        raise ValueError(
            f"{method} compares the predictions of passes, which an adaptive softmax does not give as one "
            f"distribution; train {kind} without --adaptive-softmax-cutoff"
        )
    gives = next((WITHOUT_PREDICTION[name] for name in classes if name in WITHOUT_PREDICTION), None)
    if gives and (regularizer.passes > 1 or any(map(reads_predictions, regularizer.parts))):
        raise ValueError(f"{kind} gives {gives}, of which {method} can use no prediction; {NEED_NO_PREDICTION}")


def refuse_alignment(model: nn.Module, sites: list[AttentionSite]) -> None:
    """Refuse to drop in the layer that --alignment-layer names: its loss is infinite where a position is dropped."""
    layers = {getattr(module, "alignment_layer", None) for module in model.modules()} - {None}
    for site in sites:
        if site.stack == "decoder" and site.kind == "cross" and site.layer in layers:
            raise ValueError(
                f"{site.name} is the attention that --alignment-layer {site.layer} supervises, and the loss of an "
                "alignment that is dropped is infinite; leave it out of --attn-sites"
            )
