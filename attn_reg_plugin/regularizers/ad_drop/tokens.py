"""Whole tokens as the unit of AD-DROP: those that a prediction leans on are hidden in every head and layer at once.

A position that is dropped is seen again in the next head, row and layer. Word dropout and token cutoff (Shen et al.
2020, arXiv 2009.13818) hide whole tokens at random, from the input on; HiddenCut (Chen et al. 2021, arXiv 2106.00149)
hides spans of a layer's states, by attention. Here a token is chosen by the gradient of the prediction, is hidden as a
key of attention only, and keeps its own residual stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_reg_plugin.attention.attribution import gradients_of
from attn_reg_plugin.attention.calls import AttentionCall, generator_of, recording
from attn_reg_plugin.attention.masks import PackedMask, dropped_fraction, existing_keys, sample_keep
from attn_reg_plugin.attention.sites import AttentionSite
from attn_reg_plugin.attention.tokens import TokenBias

if TYPE_CHECKING:
    from attn_reg_plugin.regularizers.ad_drop.ad_drop import ADDrop
    from attn_reg_plugin.regularizers.base.hooks.forward import Forward


#: arguments that hold the ids of tokens: of a decoder where there are both, and of an encoder or of the only stack
IDS = ("decoder_input_ids", "prev_output_tokens", "input_ids", "src_tokens")


def sequence_of(site: AttentionSite) -> tuple[str, str]:
    """The sequence that a site's keys are: its tower, and `decoder` for a decoder's own tokens or `encoder`.

    A cross attention reads what the encoder's own attention reads.
    """
    own = site.stack == "decoder" and site.kind == "self"
    return site.tower if own or site.kind == "self" else "", "decoder" if own else "encoder"


def candidate_tokens(valid: Tensor, stack: str, inputs: Mapping[str, Any]) -> Tensor:
    """The tokens that may be hidden: those that exist and are not special, bool (B, S).

    Args:
        valid: bool (B, S), the keys that exist.
        stack: `encoder` or `decoder`.
        inputs: of the forward by name: the ids (B, S), or (b, C, S) of C texts an example, under one of `IDS`, and
            `special_ids`, those of special tokens. Where one of both isn't known, the first and the last token are
            taken for special ones.
    """
    given = (inputs.get(name) for name in IDS if stack == "decoder" or name in IDS[-2:])
    given = (one.flatten(0, -2) for one in given if isinstance(one, Tensor) and one.dim() > 1)
    ids = next((one for one in given if one.shape == valid.shape), None)
    special = inputs.get("special_ids")
    if ids is None or not special:
        unknown = "the ids of special tokens: give Trainer processing_class=tokenizer, or supply(special_ids=...)"
        unknown = f"the tokens' ids: name the model's argument {' or '.join(IDS)}" if ids is None else unknown
        warnings.warn(f"ad_drop spares only the first and the last token, for it does not know {unknown}", stacklevel=2)
        places = valid.long().cumsum(-1)
        return valid & (places > 1) & (places < places[:, -1:])
    return valid & ~torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype, device=ids.device))


def hidden_tokens(
    score: Tensor,
    candidates: Tensor,
    p: float,
    q: float,
    direction: str = "high",
    *,
    enabled: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Hide each of the ⌈p·n⌉ tokens of the highest score, of n candidates of an example, with probability q.

    Args:
        score: (B, S), compared in fp32.
        candidates: bool (B, S), see `candidate_tokens`.
        p, q, direction, enabled, generator: as in `sample_keep`.

    Returns:
        The keep mask of keys, bool (B, 1, 1, S), True = attend: of all attentions over the sequence.
    """
    among = candidates[:, None, None, :]
    keep = sample_keep(score[:, None, None, :], among, p, q, direction, enabled=enabled, generator=generator)
    return keep | ~among


def hide_tokens(method: ADDrop, forward: Forward) -> None:
    """Attribute F to the tokens of each sequence, and hide the chosen ones from all attentions over it."""
    inputs, sequences = forward.inputs, dict[tuple[str, str], list[AttentionSite]]()
    for site in method.attached_sites:
        sequences.setdefault(sequence_of(site), []).append(site)
    if method.attribution == "random":
        for (_, stack), sites in sequences.items():
            sampler = partial(_tokens_at_random, method, stack, inputs, int(torch.randint(2**62, ())), {})
            for site in sites:
                site.ask(sampler=sampler)
        return
    biases = {sequence: TokenBias() for sequence in sequences}
    tokens = {site: biases[sequence] for sequence, sites in sequences.items() for site in sites}
    masks: dict[AttentionSite, list[PackedMask]] = {site: [] for site in tokens}
    with method.statistics.seconds("probe_seconds", forward.device), recording(tokens, tokens=tokens):
        with method.probe(forward) as run:
            objective, leaves = run(), [leaf for bias in biases.values() for leaf in bias.leaves]
            scores = gradients_of(objective, leaves) if leaves else []  # LayerDrop may leave all layers out
        finite, given = method.check_finite(scores), iter(scores)
        for (sequence, stack), sites in sequences.items():
            for index, valid in enumerate(biases[sequence, stack].valid):
                called = [site for site in sites if len(site.tapes) > index]
                if (score := next(given)) is None:
                    keep = torch.ones_like(valid)[:, None, None, :]
                else:
                    among = candidate_tokens(valid, stack, inputs)
                    keep = hidden_tokens(score, among, method.p, method.q, method.direction, enabled=finite)
                    _count(method, called, keep, among)
                packed: dict[Tensor | None, PackedMask] = {}  # one for all that have one mask of valid keys
                for site in called:
                    if (there := site.tapes[index].valid) not in packed:
                        packed[there] = PackedMask.of(keep, there, shared=True)
                    masks[site].append(packed[there])
    for site, calls in masks.items():
        site.ask(masks=tuple(calls))


def _count(method: ADDrop, sites: Sequence[AttentionSite], keep: Tensor, among: Tensor) -> None:
    """Add to the drop rate of each site the share of the tokens that may be hidden, `among` (B, S), that are."""
    if sites:
        method.count_share(sites, *(one.squeeze() for one in dropped_fraction(keep[:, 0, 0] & among, among)))


def _tokens_at_random(
    method: ADDrop, stack: str, inputs: Any, seed: int, drawn: dict[Any, Tensor], call: AttentionCall, *told: Any
) -> Tensor:
    """A keep mask (B, 1, 1, S) of tokens drawn at random: the same one at all sites of a sequence."""
    key = call.site, call.index
    if key not in drawn:
        (batch, *_, keys), valid, device = told
        among = candidate_tokens(existing_keys(valid, (batch, keys), device), stack, inputs)
        generator = generator_of(seed, call.index, device)
        score = torch.rand((batch, keys), generator=generator, device=device)
        drawn[key] = hidden_tokens(score, among, method.p, method.q, generator=generator)
        _count(method, [call.site], drawn[key], among)
    return drawn[key]
