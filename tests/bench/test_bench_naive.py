"""The paper's form of AD-DROP and ours agree: same masks for q = 1, same gradients after the step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from attn_reg_plugin import ADDrop, find_sites
from attn_reg_plugin.bench.families import PADDING, Settings, Workload, build_workload
from attn_reg_plugin.bench.naive_ad_drop import naive_candidates, naive_forward

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("fairseq", "bert")


def _work(family: str, shortest: float = 0.5, **options) -> Workload:
    work = build_workload(Settings(family, "tiny", 3, 7, shortest, 40, dropout=0.0, **options))
    with torch.no_grad():  # maps far from uniform
        for name, parameter in work.model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "self.query", "self.key")):
                parameter.mul_(4.0)
    return work


def _source(work: Workload) -> Tensor:
    return next(work.inputs[name] for name in ("src_tokens", "input_ids") if name in work.inputs)


def _gradients(work: Workload, outputs) -> dict[str, Tensor]:
    """Of the benchmark's own loss, without its optimizer step."""
    found = {}
    work.optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in work.model.named_parameters()})
    work.update(work.loss_of(outputs, work.targets))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shortest", [0.5, 1.0])
@pytest.mark.parametrize("p", [0.3, 0.6])
def test_the_masks_are_ours(family: str, shortest: float, p: float) -> None:
    work = _work(family, shortest)
    _, naive = naive_forward(work.model, work.inputs, work.objective, p=p, q=1.0)
    regularizer = ADDrop(p=p, q=1.0, cross_tuning="off")
    with regularizer.attach(work.model):
        work.model(**work.inputs)
        ours = {site.name: site.keep for site in regularizer.attached_sites}
    assert list(naive) == list(ours) == ["encoder.self[0]", "encoder.self[1]"]
    real = _source(work).ne(PADDING)  # nothing depends on the rows of padding
    for name, keep in ours.items():
        there = real[:, None, :, None] & real[:, None, None, :]
        if family == "bert" and name == "encoder.self[1]":
            there[:, :, 1:] = False  # the head reads the first row alone, and all the others are ties
        assert (there & ~keep).any(), "nothing is dropped"
        assert torch.equal(naive[name] & there, keep & there), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("select", ["encoder.self", "*"])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_the_gradients_are_ours(family: str, select: str, p: float) -> None:
    """With p = 1 every row is dropped whole and becomes uniform."""
    work = _work(family)
    other = copy.deepcopy(work)
    how = {"p": p, "q": 1.0}
    theirs = _gradients(work, naive_forward(work.model, work.inputs, work.objective, select=select, **how)[0])
    regularizer = ADDrop(**how, sites=select, cross_tuning="off")
    with regularizer.attach(other.model):
        ours = _gradients(other, other.model(**other.inputs))
    assert theirs.keys() == ours.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(
            theirs[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_with_nothing_to_drop_it_is_plain(family: str) -> None:
    work = _work(family)
    plain = _gradients(work, work.model(**work.inputs))
    naive = _gradients(work, naive_forward(work.model, work.inputs, work.objective, p=0.3, q=0.0)[0])
    for name, gradient in plain.items():
        torch.testing.assert_close(naive[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_left_as_it_was(family: str) -> None:
    work = _work(family)
    classes = [type(module) for module in work.model.modules()]
    naive_forward(work.model, work.inputs, work.objective)
    assert [type(module) for module in work.model.modules()] == classes
    assert not any(site.active for site in find_sites(work.model, "*"))
    assert all(parameter.grad is None for parameter in work.model.parameters())


def test_candidates_by_hand() -> None:
    attribution = torch.tensor([[0.4, 0.1, 0.9, 0.2], [0.4, 0.1, 0.9, 0.2]]).view(1, 1, 2, 4)
    valid = torch.tensor([[True, True, True, True], [True, True, False, False]]).view(1, 1, 2, 4)
    # n = 4: index int(4 · 0.7) = 2, threshold 0.4; n = 2: index int(1.4) = 1, threshold 0.4
    expected = torch.tensor([[True, False, True, False], [True, False, False, False]]).view(1, 1, 2, 4)
    assert torch.equal(naive_candidates(attribution, valid, 0.3), expected)
    assert not naive_candidates(attribution, valid, 0.0).any()
    assert torch.equal(naive_candidates(attribution, valid, 1.0), valid)
