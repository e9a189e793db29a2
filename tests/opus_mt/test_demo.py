"""A small Marian trained by Hugging Face: the same translations and BLEU in fairseq, and AD-DROP takes it further."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from sacrebleu.metrics import BLEU

from tests.opus_mt.folders import TINY, load_tokenizer, make_model, write_tokenizer
from tests.opus_mt.test_training import AD_DROP, Start

pytestmark = pytest.mark.slow
#: one layer each: it learns in half of the time that two take, which the other tests have
SHAPE = TINY | {"d_model": 96, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192}
UPDATES, LEARNING_RATE, BATCH, SIZES = 500, 3e-3, 32, (1500, 60, 100)
SEARCH = {"num_beams": 4, "max_length": 60}


@pytest.fixture(scope="module")
def trained(models: list[Path], phrases: dict, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """Hugging Face's model after its own training, and the folder it was saved to."""
    folder = tmp_path_factory.mktemp("trained") / "hf"
    sizes = write_tokenizer(folder, *models)
    model, tokenizer = make_model(sizes, SHAPE), load_tokenizer(folder)
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                torch.nn.init.xavier_uniform_(parameter)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(float("norm.weight" in name))
        model.model.shared.weight[-1] = 0
        model.final_logits_bias.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=UPDATES)
    model.train()
    torch.manual_seed(0)
    for _ in range(UPDATES):
        chosen = [phrases["train"][int(i)] for i in torch.randint(len(phrases["train"]), (BATCH,))]
        inputs = tokenizer(
            [triple.en for triple in chosen],
            text_target=[triple.ro for triple in chosen],
            return_tensors="pt",
            padding=True,
        )
        inputs["labels"][inputs["labels"] == model.config.pad_token_id] = -100
        model(**inputs).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    return model, tokenizer, folder


@pytest.fixture(scope="module")
def start(trained: tuple, tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(trained[2], tmp_path_factory.mktemp("start"), SIZES)


def raw(start: Start, name: str) -> list[str]:
    """Lines of a raw file."""
    return (start.data / "raw" / name).read_text(encoding="utf-8").splitlines()


def test_the_same_bleu_and_ad_drop_goes_on(trained: tuple, start: Start, tmp_path: Path) -> None:
    model, tokenizer, _ = trained
    theirs: list[str] = []
    sources, references = raw(start, "test.en"), raw(start, "test.ro")
    for number in range(0, len(sources), 25):
        inputs = tokenizer(sources[number : number + 25], return_tensors="pt", padding=True)
        theirs += tokenizer.batch_decode(
            model.generate(**inputs, **SEARCH, early_stopping=True), skip_special_tokens=True
        )
    search = ["--beam", "4", "--max-len-b", "58"]
    ours = start.translate(start.converted / "checkpoint.pt", *search)
    score = BLEU().corpus_score(theirs, [references]).score
    assert score > 5, "it has learnt something"
    assert ours == theirs and BLEU().corpus_score(ours, [references]).score == score
    flags = [*AD_DROP, *shlex.split("--ad-drop-q 0.2 --lr 0.0003 --max-tokens 1000 --max-epoch 3 --label-smoothing 0")]
    finished = start.train(tmp_path, *flags, without=["--disable-validation"]).check()
    losses = [float(line["valid_nll_loss"]) for line in finished.lines("valid")]
    assert len(losses) == 3 and losses[-1] < losses[0]
    tuned = start.translate(tmp_path / "checkpoint_best.pt", *search)
    assert tuned != ours and BLEU().corpus_score(tuned, [references]).score > 5
