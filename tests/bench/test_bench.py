"""`attn-reg bench`: the table, the json, the ratios, AttendOut's rounds, and what is refused; never a clock."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from attn_reg_plugin.bench import measure
from attn_reg_plugin.bench.benchmark import render, results
from attn_reg_plugin.bench.families import Settings, Workload, build_workload
from attn_reg_plugin.bench.measure import measure_peaks, measure_seconds, step_of
from attn_reg_plugin.bench.rows import Row, all_rows, select_rows
from attn_reg_plugin.cli import main
from attn_reg_plugin.regularizers import AttendOut
from attn_reg_plugin.regularizers.attend_out.game import Game
from tests.attention.tiny_model import VOCABULARY, TinyTranslator

TINY = ["bench", "--size", "tiny", "--batch", "2", "--length", "4", "--repeats", "2", "--warmup", "0", "--threads", "1"]
SETTINGS = Settings("fairseq", "tiny", 2, 4, 0.5, 20)
ROWS = {row.name: row for row in select_rows(None, "fairseq", "float32")}


@pytest.mark.parametrize("family", ["fairseq", "bert"])
def test_the_table_has_every_row(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main([*TINY, "--repeats", "1", "--family", family, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(file.read_text(encoding="utf-8"))
    expected = [row for row in all_rows() if row.exists(family, "float32")]
    assert [row["name"] for row in report["rows"]] == [row.name for row in expected]
    for row in expected:
        assert row.title in printed
    for text in ("threads 1", "torch ", f"family {family}", "vocabulary 50"):
        assert text in printed


def test_the_json(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert main([*TINY, "--shortest", "1", "--methods", "ad_drop_cross_tuned", "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["machine"]["threads"] == 1 and report["machine"]["torch"] == torch.__version__
    assert report["settings"]["batch"] == 2 and report["settings"]["shortest"] == 1.0
    plain, every, tuned = report["rows"]
    assert [plain["name"], every["name"], tuned["name"]] == ["plain", "ad_drop", "ad_drop_cross_tuned"]
    assert plain["ratio"] == 1.0
    assert every["options"]["cross_tuning"] == "off" and every["of"] is None
    assert tuned["of"] == "ad_drop"
    for row in report["rows"]:
        assert len(row["seconds"]) == len(row["ratios"]) == 2
        assert row["peak_bytes"] > 0 and row["updates"] == 1
    mean = [(a + b) / 2 for a, b in zip(plain["seconds"], every["seconds"], strict=True)]
    assert tuned["seconds"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--methods", "nonsense"], ["'nonsense'", "the methods are: plain"]),
        (["--methods", ""], ["--methods is empty"]),
        (["--family", "bert", "--methods", "all_sites"], ["'all_sites'", "--family bert"]),
        (["--methods", "ad_drop_bf16", "--dtype", "bfloat16"], ["'ad_drop_bf16'", "--dtype bfloat16"]),
        (["--shortest", "0"], ["--shortest is 0.0", "(0, 1]"]),
        (["--json", "nowhere/at/all.json"], ["--json", "does not exist"]),
        pytest.param(
            ["--device", "cuda"],
            ["no CUDA device"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_bad_options_are_refused_in_one_sentence(
    options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for word in words:
        assert word in error


def test_the_clock_of_the_process_and_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--clock", "cpu", "--dtype", "bfloat16", "--methods", "inactive,naive,ad_drop"]) == 0
    printed = capsys.readouterr().out
    assert "clock cpu" in printed and "bf16 probe" not in printed


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["integrated_cross_tuned", "inactive"], ["plain", "inactive", "integrated", "integrated_cross_tuned"]),
        (["attend_out_shared"], ["plain", "attend_out_shared"]),
    ],
)
def test_rows_bring_what_they_need_in_the_tables_order(names: list[str], chosen: list[str]) -> None:
    assert [row.name for row in select_rows(names, "fairseq", "float32")] == chosen


def test_results_by_hand() -> None:
    """Ratios are taken within a repeat: the machine slows down by four, and the means of repeat 2 are of repeat 2."""
    rows = [Row("plain", "plain"), Row("slow", "slow"), Row("mean", "mean", of="slow"), Row("rare", "rare", rare=True)]
    seconds = pd.DataFrame({"plain": [1.0, 2.0, 4.0], "slow": [3.0, 5.0, 16.0], "rare": [7.0, None, None]})
    plain, slow, mean, rare = results(rows, seconds, {"plain": 100, "slow": 150, "rare": 100})
    assert (plain["ratio"], plain["median_seconds"], plain["memory_ratio"]) == (1.0, 2.0, 1.0)
    assert (slow["ratios"], slow["ratio"], slow["median_seconds"]) == ([3.0, 2.5, 4.0], 3.0, 5.0)
    assert (mean["seconds"], mean["ratio"], mean["peak_bytes"]) == ([2.0, 3.5, 10.0], 2.0, 150)
    assert slow["memory_ratio"] == 1.5 and rare["ratios"] == [7.0]
    shown = render([{**row, "peak_bytes": row["peak_bytes"] * 2**20} for row in (plain, slow, mean, rare)])
    cells = [cell.strip() for cell in shown.splitlines()[3].split("|")]
    assert cells[1:-1] == ["slow", "3", "5.000", "3.000", "150.0", "1.500"]


def test_every_repeat_begins_with_another_row_and_rare_ones_are_measured_once(monkeypatch) -> None:
    ran = []

    @contextmanager
    def step(row, work):
        yield lambda: ran.append(row.name)

    monkeypatch.setattr(measure, "step_of", step)
    rows = [Row(name, name, rare=name == "c") for name in "abc"]
    rows.insert(1, Row("mean", "mean", of="b"))
    seconds = measure_seconds(rows, None, Settings(repeats=3, warmup=1), lambda text: None)
    assert "".join(ran) == "ab" + "abc" + "ba" + "ab", "warm-up begins with c, which it leaves out"
    there = {name: times.dropna().index.tolist() for name, times in seconds.items()}
    assert there == {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0]}


def trained(settings: Settings = SETTINGS) -> Workload:
    """A workload whose optimizer has its state."""
    work = build_workload(settings)
    work.update(work.loss(work.model, work.batch).loss)
    return work


def test_peak_memory_is_reproducible_and_counts_what_a_step_holds() -> None:
    work = trained()
    weights = sum(parameter.numel() * 4 for parameter in work.model.parameters())
    first, second = (measure_peaks([ROWS["plain"]], work)["plain"] for _ in range(2))
    assert first == second > 4 * weights, "weights, gradients and Adam's two moments"


def test_a_map_kept_in_the_graph_shows_in_the_peak() -> None:
    work = trained(Settings("fairseq", "tiny", 2, 128, 1.0, 20, dropout=0.0))
    peaks = measure_peaks([ROWS["plain"], ROWS["ad_drop"], ROWS["naive"]], work)
    assert peaks["ad_drop"] < peaks["naive"]


@pytest.mark.parametrize("name", ["integrated", "integrated_joint"])
def test_fewer_steps_of_integrated_gradients_have_the_same_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work, row = trained(), ROWS[name]
    few = measure_peaks([row], work)[name]
    monkeypatch.setattr(Row, "light", property(lambda row: row))
    all_steps = measure_peaks([row], work)[name]
    assert few == pytest.approx(all_steps, rel=1e-3)


@pytest.mark.parametrize("family", ["fairseq", "bert"])
def test_the_workload_is_the_same_for_the_same_seed(family: str) -> None:
    settings = Settings(family, "tiny", 3, 6, 0.5, 20)
    first, second = build_workload(settings), build_workload(settings)
    for name, parameter in first.model.named_parameters():
        assert torch.equal(parameter, second.model.get_parameter(name)), name
    assert torch.equal(first.targets, second.targets)
    tokens = first.inputs["input_ids"] if family == "bert" else first.targets
    assert tokens.ne(1).sum(-1).tolist() == [6, 4, 3]


@pytest.fixture
def games(monkeypatch: pytest.MonkeyPatch) -> list[Game]:
    """The games that are started."""
    started: list[Game] = []
    start = AttendOut.start
    monkeypatch.setattr(AttendOut, "start", lambda *given: started.append(start(*given)) or started[-1])
    return started


@pytest.mark.parametrize("family", ["fairseq", "bert"])
@pytest.mark.parametrize("name", ["attend_out", "attend_out_shared", "attend_out_all"])
def test_a_step_is_a_round_of_both_players(family: str, name: str, games: list[Game]) -> None:
    work, steps = trained(Settings(family, "tiny", 4, 6, 0.5, 20)), []
    work.optimizer.register_step_post_hook(lambda *_: steps.append("attacker"))
    with step_of(ROWS[name], work) as step:
        (game,) = games
        game.defender.optimizer.register_step_post_hook(lambda *_: steps.append("defender"))
        before = [p.clone() for p in game.generator.parameters()]
        step()
        assert steps == ["attacker", "defender"] * ROWS[name].updates
        assert any(not torch.equal(old, new) for old, new in zip(before, game.generator.parameters(), strict=True))
        for ours, theirs in zip(work.model.parameters(), game.defender.model.parameters(), strict=True):
            assert torch.equal(ours, theirs), "the winner is copied"


def test_the_defenders_update_is_that_of_plain_training(games: list[Game]) -> None:
    """Same batch, loss and optimizer: without dropout, one update of it ends in a plain update's weights."""
    plain, work = (trained(replace(SETTINGS, dropout=0.0)) for _ in range(2))
    settled = []
    plain.update(plain.loss(plain.model, plain.batch).loss)
    row = Row("round", "round", "attend_out", {"steps": 1, "sites": "*"})
    with step_of(row, work) as step:
        model, adam = games[0].defender.model, games[0].defender.optimizer
        adam.register_step_post_hook(lambda *_: settled.extend(p.detach().clone() for p in model.parameters()))
        step()
    for expected, found in zip(plain.model.parameters(), settled, strict=True):
        torch.testing.assert_close(found, expected)


def test_memory_counts_both_players_and_the_generator() -> None:
    work = trained()
    peaks = measure_peaks([ROWS["plain"], ROWS["attend_out"], ROWS["attend_out_shared"]], work)
    weights = sum(parameter.numel() * 4 for parameter in work.model.parameters())
    plain, own, shared = peaks["plain"], peaks["attend_out"], peaks["attend_out_shared"]
    assert shared - plain > 3 * weights, "the defender and its Adam stay"
    embedding = work.model.encoder.embed_tokens.weight.numel() * 4
    assert own - shared >= 3 * embedding, "an embedding of its own, with Adam's moments"


def test_the_memory_of_a_duel_is_the_same_whoever_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    work, peaks = trained(), []
    for wins in (True, False):
        monkeypatch.setattr(Game, "attacker_wins", lambda self, scores, wins=wins: wins)
        peaks.append(measure_peaks([ROWS["attend_out"]], work)["attend_out"])
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02), "the loser's old state is gone, and not counted on"


#: passes that are compared read their real tokens
READING = ("r_drop", "hidden_cut")
WAITING = [row for row in all_rows() if row.method not in (None, "attend_out") and not row.name.startswith(READING)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("row", WAITING, ids=lambda row: row.name)
def test_no_step_waits_for_the_device(row) -> None:
    """On a GPU the host runs ahead; models of fairseq and transformers ask for padding, and so wait themselves."""
    model = TinyTranslator(0.1).cuda()
    tokens = torch.randint(1, VOCABULARY, (4, 16), device="cuda")
    work = Workload(model, {"source": tokens, "target": tokens}, tokens, {"encoder": "source", "decoder": "target"})
    with step_of(row, work) as step:
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
            with pytest.raises(RuntimeError, match="synchronizing"):
                work.targets.sum().item()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_encoder_is_padded_on_the_right_and_has_a_label_an_example() -> None:
    work = build_workload(Settings("bert", "tiny", 3, 6, 0.5, 20))
    tokens, mask = work.inputs["input_ids"], work.inputs["attention_mask"].bool()
    assert torch.equal(mask, tokens.ne(1)) and torch.equal(mask, mask.sort(-1, descending=True).values)
    outputs, losses = work.model.eval()(**work.inputs), work.loss(work.model, work.batch).loss
    assert outputs.logits.shape == (3, 2) and work.targets.shape == losses.shape == (3,)
    torch.testing.assert_close(work.loss_of(outputs, work.targets), losses.mean())
