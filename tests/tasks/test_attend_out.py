"""AttendOut under fairseq: it trains and says so, and its defender is a plain training, under any optimizer and
precision."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from attn_reg_plugin import find_sites
from tests.comparing import differing
from tests.tasks.fairseq_runs import Job, plain_and_defender, read_checkpoint, train, train_arguments

pytestmark = pytest.mark.slow
GAME = ["--attn-reg", "attend_out", "--attend-out-steps", "3", "--attn-sites", "*", "--save-interval-updates", "5"]
GAME += ["--keep-interval-updates", "1"]


def test_rounds_and_the_generators_size_are_logged(corpus: Path, tmp_path: Path) -> None:
    """A round with the update that ends it, also the last one of a run and of its continuation.

    Encoder and decoder have unequal widths, and fairseq averages the weights by copying the attached model.
    """
    flags, ended = [*GAME, *shlex.split("--decoder-embed-dim 8 --store-ema --ema-fp32")], []
    for last in ("6", "9"):
        finished = train(corpus, tmp_path, *flags, "--max-update", last, without=["--share-all-embeddings"]).check()
        ended += [int(line["num_updates"]) for line in finished.lines() if "attn_reg/attacker_won" in line]
        said = re.findall(r"attend_out: generator of ([\d,]+) parameters, ([\d.]+) % of the model's", finished.output)
        assert len(said) == 1
    assert ended == [3, 6, 9]
    state = read_checkpoint(tmp_path / "checkpoint_last.pt")
    assert state["extra_state"]["ema"].keys() == state["model"].keys()
    sidecar = torch.load(tmp_path / "attn_reg_state_9.pt", weights_only=True)
    ours = {tensor.data_ptr(): tensor.numel() for tensor in sidecar["generator"].values()}
    theirs = {tensor.data_ptr(): tensor.numel() for name, tensor in state["model"].items() if "version" not in name}
    assert said[0] == (f"{sum(ours.values()):,}", f"{100 * sum(ours.values()) / sum(theirs.values()):.1f}")


@pytest.mark.parametrize("subset", ["train", "valid"])
def test_reward_examples_are_no_longer_than_the_model_takes(subset: str, corpus: Path, tmp_path: Path) -> None:
    """fairseq leaves longer ones out of training; learned positions end there."""
    flags = shlex.split("--encoder-learned-pos --decoder-learned-pos --max-source-positions 6 --max-target-positions 6")
    flags += ["--attend-out-reward-subset", subset, "--max-update", "7"]
    finished = train(corpus, tmp_path, *GAME, *flags).check()
    assert "have invalid sizes and will be skipped" in finished.output
    assert sum("attn_reg/attacker_won" in line for line in finished.lines()) == 2
    none = [flag if flag != "6" else "2" for flag in flags]
    refused = train(corpus, tmp_path / "none", *GAME, *none, "--skip-invalid-size-inputs-valid-test")
    assert refused.status != 0


@pytest.mark.parametrize("method", ["attend_out", "scheduled_dropout"])
def test_a_model_that_is_only_read_is_stock(method: str, corpus: Path, tmp_path: Path) -> None:
    """The task comes from the checkpoint, with the method's flags; a schedule's file may be gone."""
    schedule = tmp_path / "schedule.txt"
    schedule.write_text("drop encoder.self: 0:0.5\n", encoding="utf-8")
    flags = GAME if method == "attend_out" else ["--attn-reg", method, "--scheduled-dropout-schedule", str(schedule)]
    train(corpus, tmp_path / "run", *flags, "--max-update", "2").check()
    schedule.unlink()
    import attn_reg_plugin.tasks.attn_reg_translation  # noqa: F401  registers the checkpoint's task

    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "run" / "checkpoint_last.pt")])
    assert not model._forward_pre_hooks and not find_sites(model, "*")[0].attached
    again = train(corpus, tmp_path / "run", *flags, "--max-update", "3")
    assert (again.status == 0) == (method == "attend_out"), "training does need it"
    assert method == "attend_out" or "schedule.txt cannot be read" in again.output


#: no dropout, for the attacker's masks draw random numbers that a plain training does not
STILL = shlex.split("--dropout 0 --attention-dropout 0 --save-interval-updates 4 --max-tokens 60")
LONG = shlex.split("--attn-reg attend_out --attend-out-steps 5 --attn-sites *")
#: starts at a scale that a tiny model does not overflow
SCALE = "--fp16-init-scale 4"
FLAGS = [
    "--optimizer sgd --momentum 0.9 --lr 0.5 --clip-norm 1",
    "--optimizer adafactor --update-freq 2 --clip-norm 0.5",
    "--lr-scheduler inverse_sqrt --warmup-updates 3 --weight-decay 0.1 --amp --clip-norm 0.5",
    f"--memory-efficient-fp16 --clip-norm 0.5 {SCALE}",
    f"--fp16 --fp16-no-flatten-grads --update-freq 2 {SCALE}",
]


@pytest.mark.parametrize("flags", FLAGS)
def test_the_defender_is_a_plain_training_and_the_attacker_learns(flags: str, corpus: Path, tmp_path: Path) -> None:
    chosen = [*STILL, *shlex.split(flags)]
    options = {"without": ["--optimizer"] if "--optimizer" in flags else []}
    train(corpus, tmp_path / "plain", *chosen, "--max-update", "4", **options).check()
    finished = train(corpus, tmp_path / "game", *chosen, *LONG, "--max-update", "12", **options).check()
    attacker = read_checkpoint(tmp_path / "game" / "checkpoint_1_4.pt")["model"]
    plain, defender = plain_and_defender(tmp_path)
    assert differing(dict(attacker), plain), "the attacker has masks"
    assert differing(defender, plain) == []
    lines = finished.lines()
    assert len(lines) == 12 and sum("attn_reg/attacker_won" in line for line in lines) == 2
    assert float(lines[-1]["loss"]) < float(lines[0]["loss"]) - 0.2


def stay_on_the_cpu() -> None:
    """In the training's process: fairseq's trainer moves a number to the GPU when there was an overflow."""
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor


def test_neither_makes_an_update_that_overflows(corpus: Path, tmp_path: Path) -> None:
    flags = [*STILL, *shlex.split("--memory-efficient-fp16 --fp16-init-scale 262144 --max-update 4")]
    for name, game in (("plain", []), ("game", LONG)):
        arguments = train_arguments(corpus, tmp_path / name, *flags, *game)
        finished = Job("train", arguments, tmp_path / f"{name}.log", stay_on_the_cpu).wait().check()
        assert finished.output.count("gradient overflow detected") >= 2 and len(finished.lines()) == 4
    plain, defender = plain_and_defender(tmp_path)
    assert differing(defender, plain) == []
    state = torch.load(tmp_path / "game" / "attn_reg_state_4.pt", weights_only=True)
    assert [batch["update"] for batch in state["cache"]] == [0, 1, 2, 3]
