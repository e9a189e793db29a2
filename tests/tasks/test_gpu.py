"""Mixed precision on a GPU: AD-DROP and AttendOut train, no probe falls back, and what it makes translates."""

import shlex
from pathlib import Path

import pytest
import torch

from tests.tasks.fairseq_runs import AD_DROP, TINY, generate, hydra, hypotheses, plain_and_defender, run, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
#: starts at a scale that a tiny model does not overflow
SCALE = ["--fp16-init-scale", "4"]


@pytest.mark.parametrize("flags", ["", "--fp16", "--amp", "--memory-efficient-fp16", "--fp16 --checkpoint-activations"])
@pytest.mark.parametrize("attribution", ["gradient", "integrated"])
def test_training_on_a_gpu(flags: str, attribution: str, corpus: Path, tmp_path: Path) -> None:
    chosen = [*shlex.split(flags), *SCALE, "--ad-drop-attribution", attribution, "--attn-sites", "*"]
    finished = train(corpus, tmp_path, *AD_DROP, *chosen, "--max-update", "12", without=["--cpu"]).check()
    lines = finished.lines()
    assert len(lines) == 12 and {line["attn_reg/regularized"] for line in lines} == {"1"}
    assert sum(float(line["attn_reg/probe_fallbacks"]) for line in lines) == 0
    assert float(lines[-1]["loss"]) < float(lines[0]["loss"]) - 0.5
    assert len(hypotheses(generate(corpus, tmp_path / "checkpoint_last.pt"))) == 12


@pytest.mark.parametrize(
    "flags", ["--fp16", "--amp", "--memory-efficient-fp16", "--fp16 --update-freq 2 --clip-norm 0.5"]
)
def test_attend_out_on_a_gpu(flags: str, corpus: Path, tmp_path: Path) -> None:
    """Within the first round its defender is a plain training under the same flags, and it learns over rounds."""
    still = shlex.split(f"{flags} --dropout 0 --attention-dropout 0 --max-tokens 60 --save-interval-updates 4")
    still += SCALE
    train(corpus, tmp_path / "plain", *still, "--max-update", "4", without=["--cpu"]).check()
    game = shlex.split("--attn-reg attend_out --attend-out-steps 5 --attn-sites * --max-update 24")
    finished = train(corpus, tmp_path / "game", *still, *game, without=["--cpu"]).check()
    plain, defender = plain_and_defender(tmp_path)
    for name, ours in defender.items():
        torch.testing.assert_close(ours.cpu(), plain[name].cpu(), rtol=2e-2, atol=2e-3, msg=name)
    lines = finished.lines()
    assert len(lines) == 24 and sum("attn_reg/attacker_won" in line for line in lines) == 4
    assert float(lines[-1]["loss"]) < float(lines[0]["loss"]) - 0.3
    resumed = train(corpus, tmp_path / "game", *still, *game[:-1], "28", without=["--cpu"]).check()
    assert len(resumed.lines()) < 28 and "starts anew" not in resumed.output


@pytest.mark.parametrize("override", ["common.bf16=true", "common.bf16=true common.memory_efficient_bf16=true"])
@pytest.mark.parametrize("method", ["ad_drop", "attend_out +task.attend_out_steps=2"])
def test_bfloat16_on_a_gpu(override: str, method: str, corpus: Path, tmp_path: Path) -> None:
    """By hydra: on the command line fairseq takes `--bf16` for a TPU's."""
    arguments = [word for word in hydra(corpus, tmp_path) if word != TINY[0]]
    arguments += [*override.split(), *f"task.attn_reg={method}".split()]
    arguments += ["task.ad_drop_cross_tuning=off", "optimization.max_update=4"]
    finished = run("hydra_train", arguments, tmp_path / "train.log").check()
    assert [line["attn_reg/regularized"] for line in finished.lines()] == ["1"] * 4
