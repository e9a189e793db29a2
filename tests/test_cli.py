"""The console script itself: help without torch, names that are mistyped, lists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import attn_reg_plugin
from attn_reg_plugin.cli import COMMANDS, main

NAMES = [name for commands in COMMANDS.values() for name in commands]
#: runs a command as the console script does, and prints what it has imported
HELP = """
import sys
sys.argv = ["attn-reg", *sys.argv[1:]]
from attn_reg_plugin.cli import main
try:
    main()
finally:
    print(*({"torch", "numpy", "pandas", "fairseq", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("words", [["--help"], ["user-dir"], *([name, "--help"] for name in NAMES)], ids=" ".join)
def test_help_needs_no_framework_and_has_two_examples(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", HELP, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, ""), "which takes seconds to import"
    if words == ["user-dir"]:
        assert done.stdout == f"{Path(attn_reg_plugin.__file__).parent}\n", "the folder for fairseq"
    if words[-1] == "--help" and words[0] in NAMES[:-1]:
        _, _, examples = done.stdout.partition("examples:\n")
        assert examples.count(f"  attn-reg {words[0]} ") == 2
    if words[0] in ("compare", "finetune"):
        groups = [line for line in done.stdout.splitlines() if line in ("data:", "methods:", "training:", "running:")]
        assert sorted(groups) == ["data:", "methods:", "running:", "training:"]


def test_a_command_reads_checkpoints_without_the_packages_names(tmp_path: Path) -> None:
    """The package leaves its names out on the command line only; a command that runs has what it needs."""
    done = subprocess.run([sys.executable, "-c", HELP, "export", tmp_path, "out"], capture_output=True, text=True)
    assert "has no checkpoint" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["comprae"], "attn-reg: unknown command 'comprae'; did you mean compare?"),
        (["nonsense"], "attn-reg: unknown command 'nonsense'\n"),
        (["export", "a", "b", "--", "--fp16"], "export takes nothing behind --"),
        (["compare", "d", "--metods", "plain"], "unrecognized arguments: --metods plain; did you mean --methods?"),
    ],
)
def test_what_is_mistyped(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    assert code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["compare", "--list-methods"], "ad_drop_low  .*--attn-reg ad_drop .*--ad-drop-direction low"),
        (["finetune", "--list-methods"], "attend_out  .*--attn-reg attend_out"),
        (["finetune", "--list-tasks"], "(?s)cola  .*classification, mcc, accuracy.*tagging  .*files of your own"),
    ],
)
def test_lists(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(words)
    printed = capsys.readouterr().out
    assert re.search(line, printed) and ("untuned" in printed) == (words[0] == "compare")
