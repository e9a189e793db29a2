"""The paper's form of AD-DROP and ours agree: same masks for q = 1, same gradients after the step."""

import copy

import pytest
import torch
from torch import Tensor

from attn_reg_plugin import ADDrop, find_sites
from attn_reg_plugin.bench.families import Settings, Workload, build_workload
from attn_reg_plugin.bench.naive_ad_drop import naive_forward

FAMILIES = ("fairseq", "bert")


def _work(family: str) -> Workload:
    work = build_workload(Settings(family, "tiny", 3, 7, 0.5, 40, dropout=0.0))
    with torch.no_grad():  # maps far from uniform
        for name, parameter in work.model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "self.query", "self.key")):
                parameter.mul_(4.0)
    return work


def _gradients(work: Workload, outputs) -> dict[str, Tensor]:
    """Gradients of the benchmark's loss, without its optimizer step."""
    found = {}
    work.optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in work.model.named_parameters()})
    work.update(work.loss_of(outputs, work.targets))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("select", ["encoder.self", "*"])
@pytest.mark.parametrize(("p", "q"), [(0.3, 0.0), (0.3, 1.0), (0.6, 1.0), (1.0, 1.0)])
def test_the_gradients_are_ours(family: str, select: str, p: float, q: float) -> None:
    """With p = 1 every row is dropped whole and becomes uniform; with q = 0 nothing is dropped."""
    work = _work(family)
    other = copy.deepcopy(work)
    how = {"p": p, "q": q}
    classes = [type(module) for module in work.model.modules()]
    theirs = _gradients(work, naive_forward(work.model, work.inputs, work.objective, select=select, **how))
    regularizer = ADDrop(**how, sites=select, cross_tuning="off")
    with regularizer.attach(other.model):
        ours = _gradients(other, other.model(**other.inputs))
    assert [type(module) for module in work.model.modules()] == classes, "the model is left as it was"
    assert theirs.keys() == ours.keys() and not any(site.active for site in find_sites(work.model, "*"))
    for name, gradient in ours.items():
        torch.testing.assert_close(
            theirs[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text
        )
