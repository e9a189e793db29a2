"""What a long sequence costs in memory: nothing as large as an attention map outlives its site, whatever a method does.

Of each site only the packed bits of its mask stay, an eighth of a bool map and a 32nd of one in fp32.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attn_reg_plugin.regularizers import build
from tests.own_transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH, HEADS, LENGTH = 2, 8, 32
#: bytes of a bool map, which is the smallest of its size; everything else here is smaller
MAP = BATCH * HEADS * LENGTH * LENGTH


class Maps(TorchDispatchMode):
    """Counts the storages of at least MAP bytes that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= MAP:
                reference = StorageWeakRef(tensor.untyped_storage())
                self.alive[reference.cdata] = reference
        self.alive = {at: reference for at, reference in self.alive.items() if not reference.expired()}
        self.most = max(self.most, len(self.alive))
        return result


def most_maps(layers: int, method: str | None, **options: object) -> int:
    """How many maps are alive at once during an update of an encoder-decoder, forward and backward."""
    torch.manual_seed(0)
    model = Transformer(
        20, layers=layers, width=16, inner=16, heads=HEADS, dropout=0.0, longest=LENGTH, padding=1
    ).train()
    source, target = torch.randint(4, 20, (2, BATCH, LENGTH))
    source[0, :5], target[1, 20:] = 1, 1
    regularizer = None if method is None else build(method, sites="*", **options)
    if regularizer is not None:
        regularizer.attach(model)
        regularizer.begin_epoch(2)
    with Maps() as maps:
        nn.functional.cross_entropy(model(source, target).flatten(0, 1), target.flatten()).backward()
    assert regularizer is None or float(regularizer.statistics.take()["regularized"]) == 1
    return maps.most


def test_plain_training_has_none_of_them() -> None:
    """The fused kernel keeps none, so that those of a method show."""
    assert most_maps(3, None) == 0


@pytest.mark.parametrize("attribution", ["gradient", "random"])
def test_no_map_outlives_its_site(attribution: str) -> None:
    few, many = (most_maps(layers, "ad_drop", attribution=attribution, p=0.5, q=0.5) for layers in (1, 4))
    assert 0 < many == few
