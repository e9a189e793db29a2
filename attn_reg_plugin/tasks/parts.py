"""Tasks that hand parts of their model to the criterion, such as one model of a multilingual one for each pair.

A method hears of a model's forwards by the hooks that attaching puts on it. Where the model as a whole is never called,
its parts get the same hooks.
"""

from __future__ import annotations

from fairseq.models import FairseqMultiModel
from torch import nn
from torch.utils.hooks import RemovableHandle

from attn_reg_plugin.regularizers import Regularizer


def called_parts(model: nn.Module) -> list[nn.Module]:
    """The models in `model` that are called instead of it; none for a model that is called itself."""
    return list(dict.fromkeys(model.models.values())) if isinstance(model, FairseqMultiModel) else []


def attach_to_parts(regularizer: Regularizer, model: nn.Module) -> list[RemovableHandle]:
    """Attach to `model`, and hear of the forwards of its parts as well.

    Returns:
        the parts' hooks, to be removed when the regularizer is detached.

    Raises:
        ValueError: as `Regularizer.attach`.
    """
    before = {*model._forward_pre_hooks, *model._forward_hooks}
    regularizer.attach(model)
    handles = []
    for part in called_parts(model):
        for key, hook in model._forward_pre_hooks.items():
            if key not in before:
                given = key in model._forward_pre_hooks_with_kwargs
                handles.append(part.register_forward_pre_hook(hook, with_kwargs=given))
        for key, hook in model._forward_hooks.items():
            if key not in before:
                given, always = key in model._forward_hooks_with_kwargs, key in model._forward_hooks_always_called
                handles.append(part.register_forward_hook(hook, with_kwargs=given, always_call=always))
    return handles
