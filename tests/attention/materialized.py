"""Attention maps that stand in the autograd graph, put in place of a tiny model's own attention."""

from __future__ import annotations

import torch.nn.functional as F

from tests.attention.literal import loop_weights
from tests.attention.tiny_model import attentions


class Materialized:
    """While entered, notes every site's map after dropout, by the name of the site.

    Args:
        model: a tiny model; its own attention comes back on leaving.
        keep: keep masks by site; the maps are over the positions that they leave.
        given: maps by site that are used in place of those computed.
    """

    def __init__(self, model, keep=None, given=None):
        self.model, self.keep, self.given = model, keep or {}, given or {}
        self.maps, self.valid = {}, {}

    def __call__(self, name, query, key, value, valid, dropout_p):
        weights = F.dropout(loop_weights(query, key, valid=valid, keep=self.keep.get(name)), dropout_p)
        self.maps[name], self.valid[name] = weights, valid
        return self.given.get(name, weights) @ value

    def __enter__(self):
        for module in attentions(self.model).values():
            module.attend = self
        return self

    def __exit__(self, *error):
        for module in attentions(self.model).values():
            module.attend = None
