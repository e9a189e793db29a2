"""No method waits for the device during an update: nothing is read from it, on top of what the model reads itself.

The models run on the CPU as if it were a device. A tensor that is made without a device and from no other tensor is on
the host, as it would be under CUDA, and so is what is computed from such tensors alone: reading it waits for nothing.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from attn_reg_plugin.bench.families import Settings, Workload, build_workload
from attn_reg_plugin.bench.measure import step_of
from attn_reg_plugin.bench.rows import Row, all_rows, select_rows
from attn_reg_plugin.regularizers import REGISTRY
from attn_reg_plugin.regularizers.attend_out.game import Game

UPDATES = 2
#: the first word of a row's name -> what it may wait for; a method that has to wait declares it here
EXPECTED: dict[str, set[str]] = {
    # of (B, T, V) logits only the real tokens' are compared
    **{name: {"index", "index_put"} for name in ("r", "hidden")},
}
FAMILIES = ["fairseq", "bert"]


def measured(family: str) -> dict[str, Row]:
    """The bench's rows, of which there is one for every registered method; outside `fairseq` one a method."""
    rows = [row for row in select_rows(None, family, "float32") if row.method]
    if family != "fairseq":
        first = {row.method: row.name for row in reversed(rows) if row.name != "inactive"}
        rows = [row for row in rows if row.name in {*first.values(), "random"}]
    return {row.name: row for row in rows}


ROWS = {(family, name): row for family in FAMILIES for name, row in measured(family).items()}


class Waits(ExitStack):
    """While open, counts in `counted` what would wait for a device, by its name, if `listening`."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.host = WeakIdKeyDictionary()
        self.listening = True

    def __enter__(self) -> Self:
        for mode in (_Calls(self), _Operations(self)):
            self.enter_context(mode)
        return self

    def add(self, name: str) -> None:
        """Count one."""
        self.counted[name] += self.listening

    def on_host(self, tensors: list[Tensor]) -> bool:
        """Whether all of them are there."""
        return all(tensor in self.host for tensor in tensors)


def tensors_in(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _Operations(TorchDispatchMode):
    """Sees every operation of PyTorch's, also those within others and in the backward."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given, name = tensors_in(args, kwargs), str(function.overloadpacket).removeprefix("aten.")
        reads = torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags
        if name in ("index", "index_put", "index_put_"):  # by a mask: its True places are counted first
            reads = any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
        if reads and not self.waits.on_host(given):
            self.waits.add(name)
        result = function(*args, **kwargs)
        if given and self.waits.on_host(given):
            self.waits.host.update((tensor, True) for tensor in tensors_in(result))
        return result


class _Calls(TorchFunctionMode):
    """Sees the calls from Python: those that read a CPU tensor without an operation, and what is made on the host."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given, name = tensors_in(args, kwargs), (resolve_name(function) or "").removeprefix("torch.")
        moved = kwargs.get("device") is not None or any(isinstance(each, str | torch.device) for each in args[1:])
        if name in ("Tensor.cpu", "Tensor.numpy", "Tensor.tolist", "Tensor.__array__"):
            if not self.waits.on_host(given[:1]):
                self.waits.add(name)
        elif name == "Tensor.to" and moved and not kwargs.get("non_blocking"):
            self.waits.add(name)
        elif name in ("tensor", "as_tensor") and moved and not given:
            self.waits.add(name)  # copied to the device
        result = function(*args, **kwargs)
        if name == "Tensor.cpu":  # a copy, as of a device's tensor
            result = result.clone()
            self.waits.host[result] = True
        if not given and kwargs.get("device") in (None, "cpu"):  # a model's own is no string
            self.waits.host.update((tensor, True) for tensor in tensors_in(result))
        return result


def workload(family: str) -> Workload:
    """A tiny one; SGD, whose steps are not numbered."""
    work = build_workload(Settings(family, "tiny", 4, 6, 0.5, 20))
    work.optimizer = torch.optim.SGD(work.model.parameters(), lr=1e-3)
    return work


def waits_of(row: Row, family: str) -> tuple[Counter[str], int, Counter[str]]:
    """Count what UPDATES updates wait for, in how many forwards, and what the ends of rounds do.

    The probe's and the defender's forwards count, too.
    """
    few = {**row.options, "steps": UPDATES} if row.method == "attend_out" else row.light.options
    row, work = replace(row, updates=UPDATES, options=few), workload(family)
    waits, at_the_end, end_round, forward = Waits(), Waits(), Game.end_round, type(work.model).forward
    forwards: list[bool] = []

    @wraps(forward)
    def counting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forwards.append(self.training)
        return forward(self, *args, **kwargs)

    def apart(game: Game) -> dict[str, float]:
        counted, waits.listening = len(forwards), False
        with at_the_end:
            ended = end_round(game)
        waits.listening = True
        del forwards[counted:]
        return ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(work.model), "forward", counting)
        patch.setattr(Game, "end_round", apart)
        with step_of(row, work) as step:
            if row.epoch == 1 or row.method == "attend_out":  # what a method does once is done
                step()
            at_the_end.counted.clear()
            forwards.clear()
            with waits:
                step()
    return waits.counted, len(forwards), at_the_end.counted


@pytest.fixture(scope="module")
def plain() -> dict[str, Counter[str]]:
    """Count what a forward of each family's model waits for itself."""
    counted = {family: waits_of(Row("plain", "plain"), family)[0] for family in FAMILIES}
    return {family: Counter({name: n // UPDATES for name, n in waits.items()}) for family, waits in counted.items()}


@pytest.mark.parametrize(("family", "name"), ROWS)
def test_an_update_waits_for_nothing(family: str, name: str, plain: dict[str, Counter[str]]) -> None:
    row = ROWS[family, name]
    waits, forwards, at_the_end = waits_of(row, family)
    models = Counter({which: n * forwards for which, n in plain[family].items()})
    for which in EXPECTED.get(name.split("_")[0], ()):
        waits.pop(which, None)
        models.pop(which, None)
    assert waits == models
    assert bool(at_the_end) == (row.method == "attend_out"), "the end of a round reads who won"


def test_every_method_is_among_them() -> None:
    for family in FAMILIES:
        there = {row.method for row in all_rows() if row.method and row.exists(family, "float32")}
        assert {ROWS[key].method for key in ROWS if key[0] == family} == there
    assert {row.method for row in ROWS.values()} == set(REGISTRY)


def test_what_waits_is_counted_and_nothing_else() -> None:
    there, mask = torch.rand(3), torch.rand(3) > 0.5
    for name, act in {
        "_local_scalar_dense": lambda: float(there[0]),
        "nonzero": lambda: mask.nonzero(),
        "masked_select": lambda: there.masked_select(mask),
        "index": lambda: there[mask],
        "index_put_": lambda: there.clone().index_put_((mask,), there.new_zeros(())),
        "equal": lambda: there.equal(there),
        "Tensor.tolist": lambda: there.tolist(),
        "Tensor.cpu": lambda: (there * 2).cpu(),
        "Tensor.to": lambda: there.to("cpu"),
        "tensor": lambda: torch.tensor(1.0, device="cpu"),
    }.items():
        with Waits() as waits:
            act()
        assert waits.counted == {name: 1}
    with Waits() as waits:
        draws = torch.rand(2)
        (draws < 0.5).tolist()
        draws.view(torch.int32).tolist()
        int(torch.randint(2**62, ()))
        there.to(torch.float64)
        there.to("cpu", non_blocking=True)
        there[torch.zeros(1, dtype=torch.long)]
        torch.zeros((), device=there.device) + there
    assert not waits.counted
