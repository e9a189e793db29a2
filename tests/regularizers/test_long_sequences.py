"""Memory: nothing as large as an attention map outlives its site, and nothing grows from update to update.

Of each site only the packed bits of its mask stay, an eighth of a bool map and a 32nd of one in fp32.
"""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attn_reg_plugin.attention import attribution as of_attribution
from attn_reg_plugin.attention.calls import AttentionCall
from attn_reg_plugin.attention.functional import regularized_attention
from attn_reg_plugin.attention.masks import PackedMask
from attn_reg_plugin.regularizers import build
from tests.attention import tiny_model
from tests.attention.tiny_model import TinyClassifier, TinyTranslator, asked_site, loss_of, tokens
from tests.regularizers.attend_out.playing import begin, update

BATCH, HEADS, LENGTH = 2, 8, 32
#: bytes of a bool map, which is the smallest of its size; everything else here is smaller
MAP = BATCH * HEADS * LENGTH * LENGTH


@pytest.fixture(autouse=True)
def heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that a map of all of them is larger than a mask in fp32."""
    monkeypatch.setattr(tiny_model, "HEADS", HEADS)


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
    model = TinyTranslator(layers=layers, longest=LENGTH).train()
    source, target = tokens([LENGTH, 25], LENGTH), tokens([LENGTH, 20], LENGTH)
    regularizer = None if method is None else build(method, sites="*", **options)
    if regularizer is not None:
        regularizer.attach(model)
        regularizer.begin_epoch(2)
    with Maps() as maps:
        loss_of(model(source, target), target).backward()
    assert regularizer is None or float(regularizer.statistics.take()["regularized"]) == 1
    return maps.most


@pytest.mark.parametrize("attribution", ["gradient", "random"])
def test_no_map_outlives_its_site(attribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps of several sites are worked on together where they are small; here one is as large as that may get."""
    monkeypatch.setattr(of_attribution, "CHUNK_BYTES", 4 * MAP)
    assert most_maps(3, None) == 0, "the fused kernel keeps none, so that those of a method show"
    few, many = (most_maps(layers, "ad_drop", attribution=attribution, p=0.5, q=0.5) for layers in (1, 4))
    assert 0 < many == few


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_bits_alone(dtype: torch.dtype) -> None:
    """Also of queries in fp32, as rotary embeddings give them."""
    query = torch.randn(BATCH, HEADS, LENGTH, 4, dtype=dtype, requires_grad=True)
    site = asked_site(keep=torch.rand(BATCH, HEADS, LENGTH, LENGTH) < 0.5)
    with torch.autocast("cpu", torch.bfloat16), Maps() as maps:
        output = regularized_attention(query, query, query, site=site).sum()
        assert maps.most and not maps.alive
    output.backward()
    assert query.grad.isfinite().all()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ad_drop", {"cross_tuning": "off", "attribution": "random"}),
        ("ad_drop", {"cross_tuning": "off", "attribution": "random", "unit": "token"}),
        ("attention_dropout", {"where": "scores"}),
        ("head_drop", {}),
        ("scheduled_dropout", {"schedule": "drop encoder.self: 0:0.3"}),
    ],
)
def test_masks_go_with_their_update(method: str, options: dict[str, str]) -> None:
    """At once, and not when Python next collects cycles."""
    model, counts = TinyClassifier().train(), []
    with build(method, **options).attach(model) as regularizer:
        gc.disable()
        try:
            for _ in range(4):
                model(tokens([5, 3], 5)).sum().backward()
                regularizer.end_update()
                counts.append(sum(isinstance(one, PackedMask | AttentionCall) for one in gc.get_objects()))
        finally:
            gc.enable()
    assert counts[1] == counts[3]


def alive():
    """How many tensors there are, and how many numbers they hold."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    return len(tensors), sum(tensor.numel() for tensor in tensors)


def grown(update_once, updates):
    """Whether there is more after `updates` than after the first two."""
    seen = []
    for _ in range(updates):
        update_once()
        seen.append(alive() if len(seen) in (1, updates - 1) else None)
    return seen[1] != seen[-1]


@pytest.mark.parametrize("path", ["site", "joint"])
def test_integrated_gradients_keep_no_memory(path):
    model = TinyClassifier().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options = {"attribution": "integrated", "integrated_steps": 1, "integrated_path": path}
    regularizer = build("ad_drop", cross_tuning="off", **options)

    def update_once():
        model(tokens([5, 3], 5)).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        regularizer.end_update()

    with regularizer.attach(model):
        assert not grown(update_once, 30)


def test_attend_out_keeps_no_memory():
    """Measured at the ends of rounds, when the cache is empty; a round is three updates."""
    model, optimizer, regularizer = begin()

    def play_a_round():
        for number in range(3):
            update(model, optimizer, regularizer, number)

    with regularizer.attach(model):
        assert not grown(play_a_round, 10)
    assert regularizer.state_dict()["rounds"] == 10
