"""What a run is known by beside its flags: the files that these name, wherever they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_reg_plugin.experiments import runs_before as runs
from attn_reg_plugin.experiments.executing_before import RunError
from tests.experiments.test_runs import TRAINING, begin, run_in


@pytest.mark.parametrize("flag", ["--finetune-from-model", "--restore-file"])
def test_another_model_to_start_from_and_other_references_are_other_settings(tmp_path: Path, flag: str) -> None:
    """Earlier versions recorded neither: their runs go on, and so do those whose model is gone."""
    start, folder = tmp_path / "base.pt", tmp_path / "r"
    flags = [flag, str(start)]
    start.write_text("a")
    run = run_in(folder, *flags)
    run.claim()
    begin(folder)
    runs.write_json(folder / "result.json", {"training": TRAINING})
    start.write_text("longer")
    with pytest.raises(RunError, match=r"start: [0-9a-f]{16} there, [0-9a-f]{16} asked for"):
        run_in(folder, *flags).claim()
    start.write_text("a")
    run.data.digest_of_references = lambda: "corrected"  # type: ignore[method-assign]
    with pytest.raises(RunError, match="references: references of abc there, corrected asked for"):
        run.claim()
    del run.data.digest_of_references
    moved = start.rename(tmp_path / "moved.pt")
    run_in(folder, *flags).claim()
    run_in(folder, flag, str(moved)).claim()
    moved.write_text("b")
    with pytest.raises(RunError, match=r"start: [0-9a-f]{16} there, [0-9a-f]{16} asked for\)"):
        run_in(folder, flag, str(moved)).claim()
    other = {"--finetune-from-model": "--restore-file", "--restore-file": "--finetune-from-model"}[flag]
    with pytest.raises(RunError, match=f"{flag}: .*moved.pt"):
        run_in(folder, other, str(moved)).claim()
    earlier = {name: value for name, value in run.settings().items() if name not in ("start", "references")}
    runs.write_json(folder / "run.json", earlier)
    run.claim()


def test_another_schedule_in_the_same_file_is_another_setting(tmp_path: Path) -> None:
    """Earlier versions did not record it; comments and places make no difference."""
    file, folder = tmp_path / "learned.yaml", tmp_path / "r"
    regularized = ["--attn-reg", "scheduled_dropout", "--scheduled-dropout-schedule"]
    file.write_text("drop encoder.self: {0: 0.6, 1000: 0.1}\n")
    run = run_in(folder, *regularized, str(file))
    run.claim()
    begin(folder)
    file.write_text("drop encoder.self: {0: 0.0, 1000: 0.1}\n")
    with pytest.raises(RunError, match=r"\(schedule: drop .*: \{0: 0\.6, 1000: 0\.1\} there, drop .*: \{0: 0, 1000"):
        run.claim()
    with pytest.raises(RunError, match=r"--scheduled-dropout-schedule: .*yaml there, drop decoder: 0:0\.1 asked for"):
        run_in(folder, *regularized, "drop decoder: 0:0.1").claim()
    runs.write_json(folder / "run.json", {k: v for k, v in run.settings().items() if k != "schedule"})
    run.claim()
    runs.write_json(folder / "run.json", run.settings())
    moved = file.rename(tmp_path / "moved.yaml")
    moved.write_text("# slower\ndrop encoder.self: {0: 0.0, 1000: 0.1}\n")
    run_in(folder, *regularized, str(moved)).claim()
    assert "schedule" not in run_in(folder, "--attn-reg", "none", *regularized[2:], str(moved)).settings()
    moved.write_text("nonsense")
    assert "schedule" not in run_in(folder, *regularized, str(moved)).settings(), "the try of the command refuses it"
