"""Train each of fairseq's architectures and tasks for two updates with AD-DROP, and say which work.

    python scripts/architectures.py [--only NAME]    # writes docs/architectures.json and the table of the page

The rows are those of architecture_rows.py. Every task of fairseq's is made a regularized one as the guide says, by the
mixin, and trains a tiny model on a made-up corpus, in a process of its own. What AD-DROP refuses is trained with
attention LayerDrop, which draws at random; what fails is tried without a regularizer, to see whether fairseq fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy
import torch
from architecture_rows import ROWS, UNTRIED_MODELS, UNTRIED_TASKS, Row
from pages import filled

ROOT = Path(__file__).resolve().parents[1]
RESULT, PAGE = ROOT / "docs" / "architectures.json", ROOT / "docs" / "models.md"
SHARED = "--cpu --num-workers 0 --disable-validation --no-save --log-format json --log-interval 1 --optimizer adam "
SHARED += "--lr 0.001 --batch-size 8 --max-update 2 --required-batch-size-multiple 1"
USER_DIR = """
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY, register_task
    from attn_reg_plugin.tasks import sentence_prediction
    from attn_reg_plugin.tasks.attn_reg_task import AttnRegTask, with_attn_reg

    for name, task in list(TASK_REGISTRY.items()):
        if not issubclass(task, AttnRegTask):
            config = TASK_DATACLASS_REGISTRY.get(name)
            register = register_task("mine_" + name, dataclass=config and with_attn_reg(config))
            register(type("Mine" + task.__name__, (AttnRegTask, task), {"__doc__": name}))
"""


def _command(tool: str, words: list[str], log: Path) -> None:
    """In a process of its own: what the console script `fairseq-TOOL` does."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv = [f"fairseq-{tool}", *words]
    importlib.import_module(f"fairseq_cli.{tool}").cli_main()


def run(tool: str, words: Sequence[Any], log: Path) -> tuple[int | None, str]:
    """Run `fairseq-TOOL`: its exit code, and what it printed."""
    process = multiprocessing.get_context("fork").Process(target=_command, args=(tool, list(map(str, words)), log))
    process.start()
    process.join(120)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, log.read_text(encoding="utf-8", errors="replace")


# -- data -------------------------------------------------------------------------------------------------------------


def make_text(folder: Path) -> None:
    """A pair of made-up languages, and each of them alone, in the folders where fairseq's tasks look for them."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    drawn = torch.Generator().manual_seed(0)
    for name, size in (("train", 64), ("valid", 8)):
        lines = [torch.randint(0, 12, (n,), generator=drawn).tolist() for n in [5, 6, 7, 8] * (size // 4)]
        for lang, letter in (("en", "w"), ("ro", "v")):
            text = "".join(" ".join(f"{letter}{word}" for word in line) + "\n" for line in lines)
            (raw / f"{name}.{lang}").write_text(text, encoding="utf-8")
        (raw / f"{name}.label").write_text("".join(f"c{line[0] % 2}\n" for line in lines), encoding="utf-8")
    log, text, mono = folder / "preprocess.log", folder / "text", folder / "mono"
    pair = ["--source-lang", "en", "--target-lang", "ro", "--joined-dictionary"]
    run("preprocess", [*pair, "--trainpref", raw / "train", "--validpref", raw / "valid", "--destdir", text], log)
    words = (text / "dict.en.txt").read_text(encoding="utf-8")
    (text / "dict.txt").write_text(words, encoding="utf-8")
    alone = ["--only-source", "--srcdict", text / "dict.txt"]
    places = {"mono": "en", "mono/en": "en", "mono/ro": "ro", "text/en": "en", "text/ro": "ro"}
    places |= {"classes/input0": "en", "ranking/input0": "en", "ranking/input1": "ro"}
    places |= {"ranking/input2": "ro"}
    for place, lang in places.items():
        part = "valid" if place == "mono/ro" else "train"  # fairseq's sampling of languages fails if they are equal
        run("preprocess", [*alone, "--trainpref", raw / f"{part}.{lang}", "--destdir", folder / place], log)
    for place in ("classes", "ranking"):
        run(
            "preprocess",
            ["--only-source", "--trainpref", raw / "train.label", "--destdir", folder / place / "label"],
            log,
        )
    numbers = "".join(f"{i % 2}\n" for i in range(64))
    (folder / "ranking" / "label" / "train.label").write_text(numbers, encoding="utf-8")
    for lang in ("en", "ro"):  # as cross_lingual_lm calls them
        for kind in ("bin", "idx"):
            (mono / f"train.{lang}.{kind}").write_bytes((mono / lang / f"train.{kind}").read_bytes())


def make_speech(folder: Path) -> None:
    """Features of made-up sounds, and words for them."""
    folder.mkdir()
    rows = ["id\taudio\tn_frames\ttgt_text\tspeaker"]
    for i in range(24):
        frames = numpy.random.default_rng(i).normal(size=(40 + i, 8)).astype("float32")
        numpy.save(folder / f"{i}.npy", frames)
        rows.append(f"{i}\t{i}.npy\t{len(frames)}\tw{i % 5} w{i % 3}\ts")
    (folder / "train.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(12)), encoding="utf-8")
    config = f"audio_root: {folder}\nvocab_filename: dict.txt\ninput_feat_per_channel: 8\ninput_channels: 1\n"
    (folder / "config.yaml").write_text(config, encoding="utf-8")


# -- trying -----------------------------------------------------------------------------------------------------------


def train(row: Row, folder: Path, method: str | None) -> tuple[str, str]:
    """Two updates: `works`, `refused` or `fails`, and the last line of an error; of None, fairseq's own task."""
    place = [folder / row.data] if row.data else []
    words = [*place, "--task", f"mine_{row.task}" if method else row.task, "--arch", row.arch]
    words += [*shlex.split(row.flags), *shlex.split(SHARED), "--save-dir", folder / "checkpoints"]
    if method:
        words += ["--user-dir", folder / "everything", "--attn-reg", method, "--attn-sites", row.sites]
    words += ["--ad-drop-cross-tuning", "off"] if method == "ad_drop" else []
    code, output = run("train", words, folder / f"{row.task}-{row.arch}-{method}.log")
    shares = [float(value) for value in re.findall(r'"attn_reg/regularized": "([\d.]+)"', output)]
    updates = len(re.findall(r'"num_updates": "\d"', output))
    if code == 0 and updates >= 2 and (not method or set(shares) == {1.0}):
        return "works", ""
    lines = [
        line for line in output.strip().splitlines() if re.match(r"(\w+\.)*\w*(Error|Exception)\b|.*error: ", line)
    ]
    error = (
        lines[-1].replace(str(folder), "") if lines else f"exit code {code}, {updates} updates, regularized {shares}"
    )
    frames = re.findall(r'File "([^"]+)", line', output)
    ours = error.startswith("ValueError") and frames and "attn_reg_plugin" in frames[-1]
    return ("refused", error.removeprefix("ValueError: ")) if ours else ("fails", error)


def tried(row: Row, folder: Path) -> dict[str, str]:
    """Try a row of the table; read the result where an earlier call has tried it in this folder."""
    file = folder / "tried" / f"{row.task}-{row.arch}.json"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(_tried(row, folder)), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def _tried(row: Row, folder: Path) -> dict[str, str]:
    outcome, error = train(row, folder, "ad_drop")
    found = {"task": row.task, "arch": row.arch, "sites": row.sites, "ad_drop": outcome, "says": error}
    if outcome == "refused":
        found["at_random"], found["says_at_random"] = train(row, folder, "attention_layer_drop")
    if outcome == "fails":
        found["alone"], stock = train(row, folder, None)
        found["says"] = stock or error
    return found


def model_of(arch: str) -> str:
    """The registered model of an architecture."""
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY

    return ARCH_MODEL_NAME_REGISTRY.get(arch, arch)


# -- the page ---------------------------------------------------------------------------------------------------------


def status(row: dict[str, str]) -> str:
    """A cell: what AD-DROP does, and what methods that draw at random do."""
    if row["ad_drop"] == "works":
        return "works"
    if row["ad_drop"] == "refused":
        return "refused" + ("; methods that draw at random work" if row["at_random"] == "works" else "")
    return "fails in fairseq itself" if row["alone"] == "fails" else "fails"


def cell(text: str) -> str:
    """An error as a cell of a Markdown table: what is wrong, without what to do."""
    return " ".join(text.partition(";")[0].split()).replace("|", "\\|").replace("*", "\\*")


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Make the page's tables of it: what was tried, and what was not."""
    lines = ["| task | architecture | sites | | why |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        sites, says = row["sites"].replace("*", "\\*"), cell(row["says"])
        lines.append(f"| `{row['task']}` | `{row['arch']}` | {sites} | {status(row)} | {says} |")
    lines += ["", "Not tried:", "", "| | why |", "|---|---|"]
    for kind in ("models", "tasks"):
        reasons: dict[str, list[str]] = {}
        for name, reason in result["untried"][kind].items():
            reasons.setdefault(reason, []).append(f"`{name}`")
        lines += [f"| {kind}: {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    return {"architectures": "\n".join(lines)}


def main() -> None:
    """Try the rows, and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="rows whose task or architecture contains this; nothing is written")
    parser.add_argument("--keep", help="folder of data, logs and results, for a second call to go on from")
    arguments = parser.parse_args()
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="architectures-")).resolve()
    for name in ("train", "preprocess"):
        importlib.import_module(f"fairseq_cli.{name}")
    if not (folder / "text").exists():
        make_text(folder)
        make_speech(folder / "speech")
    (folder / "everything").mkdir(exist_ok=True)
    (folder / "everything" / "__init__.py").write_text(dedent(USER_DIR), encoding="utf-8")
    rows = []
    for row in ROWS:
        if arguments.only in f"{row.task} {row.arch}":
            rows.append({**tried(row, folder), "model": model_of(row.arch)})
            print(f"{row.task:32} {row.arch:40} {status(rows[-1])}: {rows[-1]['says'][:200]}", flush=True)
    if not arguments.only:
        result = {"rows": rows, "untried": {"models": UNTRIED_MODELS, "tasks": UNTRIED_TASKS}}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
