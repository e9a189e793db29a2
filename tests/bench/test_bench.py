"""`attn-reg bench`: the table, the json, the ratios, and what is refused. Nothing here looks at a clock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_reg_plugin.bench.benchmark import as_json
from attn_reg_plugin.bench.families import Settings, build_workload
from attn_reg_plugin.bench.measure import (
    STEPS,
    Peak,
    Result,
    mean_of,
    measure_peaks,
    measure_seconds,
    ratios,
    results,
    rotated,
)
from attn_reg_plugin.bench.rounds import PARTS, REST
from attn_reg_plugin.bench.rows import Row, all_rows, select_rows
from attn_reg_plugin.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = ["bench", "--size", "tiny", "--batch", "2", "--length", "4", "--repeats", "2", "--warmup", "0", "--threads", "1"]
SETTINGS = Settings("torch", "tiny", 2, 4, 0.5, 20)


@pytest.fixture(scope="module")
def small_rows() -> dict[str, Row]:
    return {row.name: row for row in select_rows(None, "torch", "float32")}


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["torch", "fairseq"])
def test_the_table_has_every_row(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main([*TINY, "--repeats", "1", "--family", family, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(file.read_text(encoding="utf-8"))
    expected = [row for row in all_rows() if row.exists(family, "float32")]
    assert [row["name"] for row in report["rows"]] == [row.name for row in expected]
    for row in expected:
        assert row.title in printed
    assert ("beam search, attached" in printed) == (family == "fairseq")
    for text in ("threads 1", "torch ", f"family {family}", "vocabulary 50", "≤ 1.75", "3.58–4.50"):
        assert text in printed


def test_the_json(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    chosen = ["--methods", "ad_drop_cross_tuned", "--json", str(file)]
    assert main([*TINY, "--family", "torch", "--shortest", "1", *chosen]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["machine"]["threads"] == 1 and report["machine"]["torch"] == torch.__version__
    assert report["settings"]["batch"] == 2 and report["settings"]["shortest"] == 1.0
    plain, every, tuned = report["rows"]
    assert [plain["name"], every["name"], tuned["name"]] == ["plain", "ad_drop", "ad_drop_cross_tuned"]
    assert plain["ratio"] == 1.0 and plain["budget"] is None and plain["within_budget"] is None
    assert every["options"]["cross_tuning"] == "off" and every["budget"] == 1.75
    assert tuned["mean_of"] == ["ad_drop", "plain"] and tuned["part_of"] is None
    for row in report["rows"]:
        assert len(row["seconds"]) == len(row["ratios"]) == 2
        assert 0 < row["step_peak_bytes"] < row["peak_bytes"]
        assert row["updates"] == 1
    assert tuned["seconds"] == pytest.approx(
        [(a + b) / 2 for a, b in zip(plain["seconds"], every["seconds"], strict=True)]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--methods", "nonsense"], ["'nonsense'", "the methods are: plain"]),
        (["--methods", ""], ["--methods is empty"]),
        (["--methods", "generation"], ["'generation'", "--family torch"]),
        (["--methods", "ad_drop_bf16", "--dtype", "bfloat16"], ["'ad_drop_bf16'", "--dtype bfloat16"]),
        (["--batch", "0"], ["--batch is 0", "at least 1"]),
        (["--length", "1"], ["--length is 1", "at least 2"]),
        (["--vocabulary", "3"], ["--vocabulary is 3", "at least 8"]),
        (["--shortest", "0"], ["--shortest is 0.0", "(0, 1]"]),
        (["--dropout", "1"], ["--dropout is 1.0", "[0, 1)"]),
        (["--repeats", "0"], ["--repeats is 0", "at least 1"]),
        (["--warmup", "-1"], ["--warmup is -1", "at least 0"]),
        (["--threads", "0"], ["--threads is 0", "at least 1"]),
        (["--json", "nowhere/at/all.json"], ["--json", "does not exist"]),
    ],
)
def test_bad_options_are_refused_in_one_sentence(
    options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--family", "torch", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for word in words:
        assert word in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_clock_of_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--family", "torch", "--clock", "cpu", "--methods", "inactive"]) == 0
    assert "clock cpu" in capsys.readouterr().out


def test_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--family", "torch", "--dtype", "bfloat16", "--methods", "naive,ad_drop"]) == 0
    assert "bf16 probe" not in capsys.readouterr().out


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_well_formed() -> None:
    names = [row.name for row in all_rows()]
    assert len(set(names)) == len(names)
    for row in all_rows():
        assert set(row.needs()) <= set(names)
        assert (row.kind in ("mean", "part")) == (row.of is not None)
        assert row.kind in ("mean", "part") or row.kind in STEPS
        if row.kind == "part":
            assert row.name.removeprefix(f"{row.of}_") in (*PARTS, REST)
        if row.kind == "round":
            assert row.updates == row.options["steps"]
            parts = [other for other in all_rows() if other.kind == "part" and other.of == row.name]
            assert len(parts) == len(PARTS) + 1


def test_rows_bring_what_they_need_in_the_tables_order() -> None:
    chosen = select_rows(["integrated_cross_tuned", "inactive"], "fairseq", "float32")
    assert [row.name for row in chosen] == ["plain", "inactive", "integrated", "integrated_cross_tuned"]
    chosen = select_rows(["attend_out_shared"], "torch", "float32")
    assert [row.name for row in chosen[:2]] == ["plain", "attend_out_shared"]
    assert all(row.of == "attend_out_shared" for row in chosen[2:]) and len(chosen) == 2 + len(PARTS) + 1
    chosen = select_rows(["generation_attached"], "fairseq", "float32")
    assert [row.name for row in chosen] == ["generation", "generation_attached"]


# -- measuring --------------------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_repeat() -> None:
    # a machine that slows down: the ratio of the medians would be 4 / 2, but each repeat says 1.5
    assert ratios({0: 1.5, 1: 3.0, 2: 6.0}, {0: 1.0, 1: 2.0, 2: 4.0}) == [1.5, 1.5, 1.5]
    assert ratios({0: 6.0}, {0: 2.0, 1: 100.0}) == [3.0]
    with pytest.raises(ValueError, match="no repeat in common"):
        ratios({0: 1.0}, {1: 1.0})


def test_results_by_hand() -> None:
    rows = [
        Row("plain", "plain"),
        Row("slow", "slow", budget=2.0, memory_budget=1.0),
        Row("mean", "mean", kind="mean", of="slow", budget=2.0),
    ]
    seconds = {"plain": {0: 1.0, 1: 2.0, 2: 4.0}, "slow": {0: 3.0, 1: 5.0, 2: 16.0}}
    peaks = {"plain": Peak(100, 40), "slow": Peak(150, 90)}
    plain, slow, mean = results(rows, seconds, peaks)
    assert (plain.ratio, plain.median, plain.memory_ratio) == (1.0, 2.0, 1.0)
    assert (slow.ratio, slow.median, slow.memory_ratio, slow.step_memory_ratio) == (3.0, 5.0, 1.5, 2.25)
    assert (slow.within_budget, slow.within_memory_budget) == (False, False)
    assert mean.seconds == mean_of(seconds["plain"], seconds["slow"]) == {0: 2.0, 1: 3.5, 2: 10.0}
    assert (mean.ratio, mean.within_budget, mean.within_memory_budget) == (2.0, True, None)
    assert mean.peak == slow.peak
    both = results([*rows[:2], Row("both", "both", kind="mean", of="slow", other="slow")], seconds, peaks)
    assert both[2].seconds == slow.seconds and as_json(both)[2]["mean_of"] == ["slow", "slow"]
    part = results(
        [rows[0], Row("slow_half", "half", kind="part", of="slow")], {**seconds, "slow_half": {1: 1.0}}, peaks
    )[1]
    assert part.ratio == 0.5 and part.peak is part.memory_ratio is part.step_memory_ratio is None


def test_each_repeat_starts_with_another_row() -> None:
    rows = [Row(name, name) for name in "abc"]
    assert ["".join(row.name for row in rotated(rows, repeat)) for repeat in range(-1, 3)] == [
        "cab",
        "abc",
        "bca",
        "cab",
    ]


def test_rare_rows_run_once(small_rows: dict[str, Row]) -> None:
    seen = []
    rows = [small_rows["plain"], Row("rare", "rare", rare=True), small_rows["ad_drop_cross_tuned"]]
    seconds = measure_seconds(
        rows,
        build_workload(SETTINGS),
        repeats=2,
        warmup=1,
        progress=lambda row, repeat: seen.append((row.name, repeat)),
    )
    assert sorted(seen, key=str) == sorted([("plain", None), ("plain", 0), ("plain", 1), ("rare", 0)], key=str)
    assert {name: sorted(times) for name, times in seconds.items()} == {"plain": [0, 1], "rare": [0]}


def test_peak_memory_is_reproducible_and_counts_what_a_step_holds(small_rows: dict[str, Row]) -> None:
    work = build_workload(SETTINGS)
    work.update(work.model(**work.inputs))
    weights = sum(parameter.numel() * 4 for parameter in work.model.parameters())
    one, two = (measure_peaks([small_rows["plain"]], work)["plain"] for _ in range(2))
    assert one == two
    assert one.step > weights, "the gradients alone are as large as the weights"
    assert one.total > one.step + 3 * weights, "weights and Adam's two moments stay"


def test_a_map_kept_in_the_graph_shows_in_the_peak(small_rows: dict[str, Row]) -> None:
    work = build_workload(Settings("torch", "tiny", 2, 128, 1.0, 20))
    work.update(work.model(**work.inputs))
    peaks = measure_peaks([small_rows["plain"], small_rows["ad_drop"], small_rows["naive"]], work)
    assert peaks["ad_drop"].total < peaks["naive"].total


def test_fewer_steps_of_integrated_gradients_have_the_same_peak(small_rows: dict[str, Row]) -> None:
    work = build_workload(SETTINGS)
    work.update(work.model(**work.inputs))
    for name in ("integrated", "integrated_joint"):
        row = small_rows[name]
        few, all_steps = (measure_peaks([r], work)[name] for r in (row, replace(row, memory_options={})))
        assert few == all_steps


@pytest.mark.parametrize("family", ["torch", "fairseq"])
def test_the_workload_is_the_same_for_the_same_seed(family: str) -> None:
    settings = Settings(family, "tiny", 3, 6, 0.5, 20)
    one, two = build_workload(settings), build_workload(settings)
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, two.model.get_parameter(name)), name
    assert torch.equal(one.targets, two.targets)
    lengths = one.targets.ne(1).sum(-1).tolist()
    assert (max(lengths), min(lengths)) == (6, 3)
    assert (one.generate is None) == (family == "torch")


def test_the_encoder_is_padded_on_the_right_and_has_a_label_an_example() -> None:
    work = build_workload(Settings("bert", "tiny", 3, 6, 0.5, 20))
    tokens, mask = work.inputs["input_ids"], work.inputs["attention_mask"].bool()
    assert torch.equal(mask, tokens.ne(1)) and mask.sum(-1).tolist() == [6, 4, 3]
    assert torch.equal(mask, mask.sort(-1, descending=True).values)
    outputs = work.model(**work.inputs)
    assert outputs.logits.shape == (3, 2) and work.targets.shape == (3,)
    torch.testing.assert_close(work.loss(outputs), work.example_losses(outputs, work.targets).mean())


def test_no_row_of_the_encoder_is_a_second_one_for_all_sites() -> None:
    names = {row.name for row in select_rows(None, "bert", "float32")}
    assert {"ad_drop", "naive_cross_tuned", "attend_out", "attend_out_masks"} <= names
    assert not [
        name for name in names if "all" in name.split("_") or name.startswith(("attention_layer_drop", "generation"))
    ]


def test_the_result_of_a_row_without_budget_is_not_judged() -> None:
    result = Result(Row("a", "a"), {0: 1.0}, [9.0], Peak(9, 9), Peak(1, 1))
    assert result.within_budget is None and result.within_memory_budget is None
