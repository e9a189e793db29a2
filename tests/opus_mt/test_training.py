"""A converted OPUS-MT model is fine-tuned by fairseq-train with AD-DROP and AttendOut, translates, and goes back."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import MarianMTModel

from attn_reg_plugin.cli import main
from attn_reg_plugin.opus_mt.conversion import CHECKPOINT, FLAGS, to_fairseq, to_huggingface
from attn_reg_plugin.opus_mt.marian_folder import MarianFolder
from attn_reg_plugin.opus_mt.tokenization import OpusMTTokenizer
from tests.opus_mt.folders import load_tokenizer
from tests.tasks.fairseq_runs import (
    PLUGIN,
    Finished,
    finish_ranks,
    generate,
    read_checkpoint,
    run,
    start_ranks,
    train,
    train_arguments,
)

KINDS = ("encoder.self", "decoder.self", "decoder.cross")
AD_DROP = shlex.split("--attn-reg ad_drop --ad-drop-p 0.4 --ad-drop-q 0.5 --ad-drop-cross-tuning off --attn-sites *")
ATTEND_OUT = shlex.split("--attn-reg attend_out --attend-out-steps 3 --attn-sites *")
SHORT = shlex.split("--max-update 6 --lr 0.001 --max-tokens 300")


class Start:
    """A converted model and a corpus prepared for it."""

    def __init__(self, folder: Path, root: Path, sizes: tuple[int, int, int] = (120, 20, 20)) -> None:
        self.hf, self.converted, self.data = folder, root / "converted", root / "data"
        to_fairseq(MarianFolder.open(folder), self.converted)
        numbers = [
            word for pair in zip(("--train", "--valid", "--test"), map(str, sizes), strict=True) for word in pair
        ]
        words = ["prepare", "phrasebook", "--pair", "en-ro", "--out", str(self.data), *numbers]
        with contextlib.redirect_stdout(io.StringIO()):
            assert main([*words, "--opus-mt", str(self.converted)]) == 0
        self.model = shlex.split((self.converted / FLAGS).read_text(encoding="utf-8"))
        self.from_here = ["--finetune-from-model", str(self.converted / CHECKPOINT)]
        self.bpe = ["--bpe", "opus_mt", "--opus-mt-folder", str(self.data / "opus_mt")]

    def train(self, save: Path, *flags: str, **options: object) -> Finished:
        """Fine-tune."""
        return train(self.data / "bin", save, *self.from_here, *flags, model=self.model, **options)

    def arguments(self, save: Path, *flags: str) -> list[str]:
        """Arguments of fairseq-train for fine-tuning."""
        return train_arguments(self.data / "bin", save, *self.from_here, *flags, model=self.model)

    def translate(self, checkpoint: Path, *flags: str) -> list[str]:
        """The test set's translations as text, in the corpus's order."""
        output = generate(self.data / "bin", checkpoint, *self.bpe, "--min-len", "0", *flags).check().output
        found = {int(n): text for n, text in re.findall(r"^D-(\d+)\t[^\t\n]*\t(.*)$", output, re.MULTILINE)}
        return [found[number] for number in sorted(found)]


@pytest.fixture(scope="module")
def start(marian: tuple, tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(marian[1], tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def tuned(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of AD-DROP on all attention."""
    folder = tmp_path_factory.mktemp("tuned")
    finished = start.train(folder, *AD_DROP, *SHORT, "--attn-rates-by-site").check()
    lines = finished.lines()
    assert len(lines) == 6 and {line["attn_reg/regularized"] for line in lines} == {"1"}
    for layer in range(2):
        for kind in KINDS:
            assert float(lines[-1][f"attn_reg/drop_{kind}[{layer}]"]) > 0.05, sorted(lines[-1])
    assert sum(float(line["attn_reg/probe_fallbacks"]) for line in lines) == 0
    return folder


@pytest.mark.slow
def test_what_was_tuned_goes_back_and_says_the_same(start: Start, tuned: Path, tmp_path: Path) -> None:
    """The tokenizer and the configuration are found beside the data."""
    assert main(["convert", "opus-mt", "--to-hf", str(tuned), str(tmp_path / "hf")]) == 0
    before, after = (MarianMTModel.from_pretrained(path).eval() for path in (start.hf, tmp_path / "hf"))
    assert not torch.equal(before.model.shared.weight, after.model.shared.weight)
    assert torch.equal(before.final_logits_bias, after.final_logits_bias)
    tokenizer = load_tokenizer(tmp_path / "hf")
    sources = (start.data / "raw" / "test.en").read_text(encoding="utf-8").splitlines()
    rows = after.generate(
        **tokenizer(sources, return_tensors="pt", padding=True), max_length=16, num_beams=2, early_stopping=True
    )
    ours = start.translate(tuned / "checkpoint_last.pt", "--max-len-b", "14")
    theirs = tokenizer.batch_decode(rows, skip_special_tokens=True)
    # at the longest length Hugging Face counts `</s>` as certain, so what ends there may differ
    ended = [number for number, row in enumerate(rows.tolist()) if row.index(0) < 15]
    assert len(ours) == 20
    assert [ours[number] for number in ended] == [theirs[number] for number in ended]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    ["--beam 4 --lenpen 0.6", "--sampling --beam 1", "--prefix-size 2", "--score-reference", "--diverse-beam-groups 2"],
)
def test_options_of_fairseq_generate(flags: str, start: Start, tuned: Path) -> None:
    assert len(start.translate(tuned / "checkpoint_last.pt", *shlex.split(flags))) == 20


@pytest.mark.slow
def test_fairseq_interactive_takes_and_gives_text(start: Start, tmp_path: Path) -> None:
    """On the converted folder itself, nothing prepared."""
    (tmp_path / "in.txt").write_text("The house is old.\nA nurse\n", encoding="utf-8")
    words = [str(start.converted), "--user-dir", PLUGIN, "--path", str(start.converted / CHECKPOINT), "--cpu"]
    words += ["--source-lang", "en", "--target-lang", "ro", "--input", str(tmp_path / "in.txt"), "--buffer-size", "2"]
    words += ["--max-len-b", "10", "--bpe", "opus_mt", "--opus-mt-folder", str(start.converted)]
    output = run("interactive", words, tmp_path / "log").check().output
    assert len(re.findall(r"^D-\d\t\S+\t.*$", output, re.MULTILINE)) == 2
    pieces = " ".join(OpusMTTokenizer(start.converted).source.encode("The house is old."))
    assert f"S-0\t{pieces}\n" in output


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--amp", "--memory-efficient-fp16", "--checkpoint-activations"])
def test_other_ways_to_train(flags: str, start: Start, tmp_path: Path) -> None:
    finished = start.train(tmp_path, *AD_DROP, *SHORT, *shlex.split(flags), "--fp16-init-scale", "4").check()
    assert {line["attn_reg/regularized"] for line in finished.lines()} == {"1"}
    to_huggingface(tmp_path, tmp_path / "hf")


@pytest.mark.slow
def test_two_processes_are_one_with_the_whole_batch(start: Start, tmp_path: Path) -> None:
    """Without dropout and with q = 1 nothing is drawn; with plain SGD a step is the gradient.

    One process has the same two halves: random weights attend so sharply that attributions tie to the last bit.
    """
    flags = [*AD_DROP, *shlex.split("--ad-drop-q 1 --dropout 0 --max-tokens 9000 --max-update 2")]
    flags += shlex.split("--optimizer sgd --lr 0.05 --clip-norm 0")
    jobs = start_ranks(start.arguments(tmp_path / "two", *flags, "--batch-size", "60"), tmp_path / "rank")
    start.train(tmp_path / "one", *flags, "--batch-size", "60", "--update-freq", "2").check()
    first = finish_ranks(jobs)
    assert len(first.lines()) == 2
    weights = [read_checkpoint(tmp_path / name / "checkpoint_last.pt")["model"] for name in ("two", "one")]
    before = read_checkpoint(start.converted / CHECKPOINT)["model"]
    moved = max((value - before[name]).abs().max() for name, value in weights[1].items())
    assert moved > 1e-2
    for name, value in weights[1].items():
        assert (weights[0][name] - value).abs().max() <= 1e-3 * moved, name


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("flags", ["--fp16", "--amp", "--memory-efficient-fp16", "--amp --amp-scale-window 2"])
@pytest.mark.parametrize("method", ["ad_drop", "attend_out"])
def test_half_precision_on_a_gpu(flags: str, method: str, start: Start, tmp_path: Path) -> None:
    words = [*(AD_DROP if method == "ad_drop" else ATTEND_OUT), *SHORT, *shlex.split(flags), "--fp16-init-scale", "4"]
    finished = start.train(tmp_path, *words, without=["--cpu"]).check()
    assert len(finished.lines()) == 6
    to_huggingface(tmp_path, tmp_path / "hf", start.converted)
    assert len(start.translate(tmp_path / "checkpoint_last.pt")) == 20
