"""Two processes with half the batch each are one process with the whole batch."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from tests.models.hf_folders import TOYS, make_encoder
from tests.tasks.encoder_runs import encoder_arguments
from tests.tasks.fairseq_runs import (
    AD_DROP,
    Finished,
    differing,
    finish_ranks,
    read_checkpoint,
    start_ranks,
    train_arguments,
)

pytestmark = pytest.mark.slow

#: no dropout and q = 1, so that nothing is drawn; plain SGD, so that a step is the gradient
FLAGS = [*AD_DROP, *shlex.split("--attn-sites * --ad-drop-q 1 --dropout 0 --attention-dropout 0 --max-tokens 5000")]
SGD = shlex.split("--optimizer sgd --lr 0.5 --clip-norm 0")
SENTENCES, RATE = 160, 0.5


def processes(corpus: Path, folder: Path, ranks: int, *flags: str, backend: str = "legacy_ddp") -> Finished:
    """A training of one or two processes; the first one's end."""
    without = [] if "adam" in flags else ["--optimizer"]
    arguments = train_arguments(corpus, folder / "save", *FLAGS, *SGD, *flags, without=without)
    return finish_ranks(start_ranks(arguments, folder / "rank", ranks, backend=backend))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(folder / "save" / "checkpoint_last.pt")["model"])


def assert_alike(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """To 1e-5 of the largest value there is."""
    scale = max(value.abs().max() for value in theirs.values())
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= 1e-5 * scale, name


def test_the_gradient_of_two_processes_is_that_of_the_joined_batch(corpus: Path, tmp_path: Path) -> None:
    """One update on all sentences: by two processes, by one in two halves, by one at once; and none at all."""
    made = {name: tmp_path / name for name in ("two", "halves", "whole", "start")}
    half = ["--batch-size", str(SENTENCES // 2), "--max-update", "1"]
    processes(corpus, made["two"], 2, *half)
    processes(corpus, made["halves"], 1, *half, "--update-freq", "2")
    processes(corpus, made["whole"], 1, "--batch-size", str(SENTENCES), "--max-update", "1")
    processes(corpus, made["start"], 1, *half, "--lr", "1e-30")
    start = weights(made["start"])
    steps = {
        name: {key: (start[key] - value) / RATE for key, value in weights(made[name]).items()}
        for name in ("two", "halves", "whole")
    }
    assert max(value.abs().max() for value in steps["whole"].values()) > 1e-2
    assert_alike(steps["two"], steps["whole"])
    assert_alike(steps["two"], steps["halves"])


def test_three_updates_of_two_processes_are_those_of_one(corpus: Path, tmp_path: Path) -> None:
    """Also with PyTorch's data parallel on CPUs, where fairseq by itself fails."""
    three = ["--max-update", "3", "--ad-drop-cross-tuning", "epoch"]
    half = [*three, "--batch-size", str(SENTENCES // 2)]
    ours = processes(corpus, tmp_path / "two", 2, *half)
    pytorch = processes(corpus, tmp_path / "pytorch", 2, *half, backend="pytorch_ddp")
    assert_alike(weights(tmp_path / "pytorch"), weights(tmp_path / "two"))
    assert pytorch.lines()[1]["attn_reg/regularized"] == "1"
    theirs = processes(corpus, tmp_path / "whole", 1, *three, "--batch-size", str(SENTENCES))
    assert [line.get("attn_reg/regularized") for line in ours.lines()] == [None, "1", None]
    for key in ("loss", "gnorm", "wpb"):
        assert [line.get(key) for line in ours.lines()] == [line.get(key) for line in theirs.lines()]
    assert_alike(weights(tmp_path / "two"), weights(tmp_path / "whole"))


def test_two_processes_with_dropout_and_unequal_shares(corpus: Path, tmp_path: Path) -> None:
    """An odd number of batches: one process has a batch too few and goes along with an empty one.

    Layers are left out by each on its own.
    """
    flags = shlex.split("--dropout 0.1 --attention-dropout 0.1 --encoder-layerdrop 0.5 --ad-drop-q 0.5")
    flags += shlex.split("--batch-size 54 --max-update 4")
    finished = processes(corpus, tmp_path, 2, *flags, *shlex.split("--optimizer adam --lr 0.01"))
    assert len(finished.lines()) == 4 and finished.lines()[-1]["epoch"] == 2
    assert {line["attn_reg/regularized"] for line in finished.lines()} == {"1"}


# -- encoders -------------------------------------------------------------------------------------------------------

#: nothing is drawn: no dropout, and every candidate is dropped; plain SGD, so that a step is the gradient
STILL_ENCODER = shlex.split(
    "--dropout 0 --attention-dropout 0 --classifier-dropout 0 --optimizer sgd --lr 0.05 --clip-norm 0"
)
ENCODER_AD_DROP = shlex.split("--attn-reg ad_drop --ad-drop-p 0.4 --ad-drop-q 1 --ad-drop-cross-tuning off")


def encoder_processes(row: str, folder: Path, name: str, ranks: int, *flags: str) -> Finished:
    """A training by one or two processes; the first one's end."""
    data, encoder = folder / "data", folder / "encoder"
    if not data.exists():
        TOYS[row][0](data)
        make_encoder(encoder)
    arguments = encoder_arguments(row, data, encoder, folder / name / "save", *flags)
    return finish_ranks(start_ranks(arguments, folder / f"{name}-", ranks))


@pytest.mark.parametrize("row", ["rte", "wnut17"])
def test_two_processes_are_one_with_twice_the_batch(row: str, tmp_path: Path) -> None:
    """Words are counted over both, and so is the metric of the validation set, whose last batch is one's alone."""
    flags = [*STILL_ENCODER, *ENCODER_AD_DROP, "--max-epoch", "2"]
    two = encoder_processes(row, tmp_path, "two", 2, *flags)
    one = encoder_processes(row, tmp_path, "one", 1, *flags, "--update-freq", "2")
    assert len(two.lines()) == len(one.lines()) == 6
    for ours, theirs in zip(two.lines(), one.lines(), strict=True):
        assert ours["attn_reg/regularized"] == theirs["attn_reg/regularized"] == "1"
        assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), abs=2e-4)
    assert_alike(weights(tmp_path / "two"), weights(tmp_path / "one"))
    metric = f"valid_{TOYS[row][3]}"
    assert [line[metric] for line in two.lines("valid")] == [line[metric] for line in one.lines("valid")]


@pytest.mark.parametrize("row", ["rte", "wnut17"])
def test_attend_out_in_two_processes(row: str, tmp_path: Path) -> None:
    """Until the round ends the defender is a plain training of two processes; then both go on from the winner."""
    flags = ["--dropout", "0", "--attention-dropout", "0", "--classifier-dropout", "0", "--max-update", "5"]
    encoder_processes(row, tmp_path, "plain", 2, *flags, "--attn-reg", "none")
    game = ["--attn-reg", "attend_out", "--attend-out-steps"]
    encoder_processes(row, tmp_path, "game", 2, *flags, *game, "6")
    state = torch.load(tmp_path / "game" / "save" / "attn_reg_state_5.pt", weights_only=True)
    assert differing(dict(state["defender"]["model"]), weights(tmp_path / "plain")) == []
    assert differing(weights(tmp_path / "game"), weights(tmp_path / "plain")), "the attacker is another"
    finished = encoder_processes(row, tmp_path, "rounds", 2, *flags, *game, "2", "--max-update", "6")
    rounds = [line for line in finished.lines() if "attn_reg/attacker_won" in line]
    assert [line["num_updates"] for line in rounds] == ["2", "4", "6"]
    assert {float(line["attn_reg/attacker_won"]) for line in rounds} <= {0.0, 1.0}
    state = torch.load(tmp_path / "rounds" / "save" / "attn_reg_state_6.pt", weights_only=True)
    assert differing(dict(state["defender"]["model"]), weights(tmp_path / "rounds")) == []
