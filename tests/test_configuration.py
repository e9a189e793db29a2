"""Settings as flags and as YAML: what wins, what is converted, and what is refused by its name."""

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attn_reg_plugin.configuration import add_arguments, setting
from attn_reg_plugin.experiments.steps import from_arguments


@dataclass(frozen=True, kw_only=True)
class Settings:
    data: Path = setting("the data", metavar="DATA", positional=True)
    lr: float = setting("learning rate", 0.5, within="(0, inf)")
    layers: int | None = setting("layers", None, within="[1, inf)")
    kind: str = setting("a kind", "one", choices=("one", "two"))
    names: tuple[str, ...] = setting("names", ())
    texts: tuple[str, ...] = setting("texts", (), repeated=True)
    many: Any = setting("a mapping, or names", "a,b")
    deep: bool = setting("switch", False)
    flags: str = setting("what follows --", "", rest=True)

    def __post_init__(self) -> None:
        if "z" in self.texts:
            raise ValueError("--texts wants no 'z'")
        if self.deep and self.layers == 7:
            raise ValueError(f"{self.layers} layers cannot be deep")


def parse(*words: str, config: str | None = None, folder: Path | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Settings)
    if config is not None:
        (folder / "c.yaml").write_text(config, encoding="utf-8")
        words = (str(folder / "c.yaml"), *words)
    place = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_intermixed_args(words[:place])
    arguments.command, arguments.rest = "compare", words[place + 1 :]
    return from_arguments(Settings, arguments)


def test_values_are_converted() -> None:
    line = "--lr 1e-3 x --layers 2 --names a,b --texts 1,2 --texts 3 --deep -- --fp16 'a b'"
    found = parse(*shlex.split(line))
    assert (found.lr, found.layers, found.names, found.texts) == (0.001, 2, ("a", "b"), ("1,2", "3"))
    assert (found.deep, found.flags, found.data) == (True, "--fp16 'a b'", Path("x"))


FILE = """
out: o
compare:
  data: ${out}/d
  lr: 1e-4
  names: [a, b]
  deep: true
  flags: --x
  many: {a: {p: 1}, b: }
"""


def test_flags_win_over_a_section_of_a_file(tmp_path: Path) -> None:
    found = parse("--no-deep", "--many", "a,c", "--", "--y", config=FILE, folder=tmp_path)
    assert (found.data, found.lr, found.names, found.deep) == (Path("o/d"), 1e-4, ("a", "b"), False)
    assert found.flags == "--x --y"
    assert found.many == {"a": {"p": 1}, "c": None}, "names pick entries of a mapping"
    assert parse(config=FILE, folder=tmp_path).many == {"a": {"p": 1}, "b": None}


def test_a_file_without_sections(tmp_path: Path) -> None:
    found = parse("--kind", "two", config="data: ${kind}/d\nlayers: 3\nnames: a, b\n", folder=tmp_path)
    assert (found.data, found.layers, found.names) == (Path("two/d"), 3, ("a", "b"))


@pytest.mark.parametrize(
    ("words", "config", "said"),
    [
        (["x", "--lr", "0"], None, "--lr is 0.0, but must be above 0"),
        (["x", "--lr", "nan"], None, "--lr is nan, but must"),
        (["x", "--kind", "three"], None, "--kind is 'three', but must be one of one, two"),
        ([], None, "DATA is missing: the data"),
        (["x"], "rate: 1", "{}: unknown setting 'rate'; the settings are: data, lr, layers"),
        (["x"], "lr: fast", "{}: lr is 'fast', but must be a number"),
        (["x"], "lr: ", "{}: lr is None, but must be a number"),
        (["x"], "lr: ${rate}", "{}: lr: Interpolation key 'rate' not found"),
        (["x"], "[1]", "{} holds no settings"),
        (["x"], "a: {", "{} cannot be read as YAML"),
        (
            ["x"],
            "lr: {a: 1}\ncompare: {lr: '${lr.a}'}",
            "{}: the mapping 'lr' above the sections has the name of a setting",
        ),
        (["x"], "rate: 1\ncompare: {lr: 1}", "{}: unknown key 'rate': it is in no section"),
        (["x"], "rate: {a: 1}\ncompare: {lr: 1}", "{}: unknown step 'rate'; the steps are: convert opus-mt"),
        (["x"], "layers: ???", "--layers is missing: layers"),
        (["x"], "lr: 1\nlr: 2", 'found duplicate key lr in "{}", line 2'),
        (["x"], "layers: 1:30", "in line 1 1:30 is a number in base 60; put it in quotes"),
        (["x"], "many: &a [*a]", "{} cannot be read as YAML: in line 1 *a is an alias; refer to a value by ${{name}}"),
        (["x"], "names: [[1]]", "{}: names is [[1]], but must be text, or several with commas"),
        (["x"], "names: [a, yes]", "{}: names is ['a', True], but must be text; put yes, no, on and off in quotes"),
        (["x", "--layers", "9" * 400], None, "--layers is a number of more than 308 digits, but must be finite"),
        (["", "--lr", "1"], None, "--data is empty, but must be a path"),
        (["x"], "texts: [z]", "{}: --texts wants no 'z'"),
        (["x", "--texts", "z"], "lr: 1", "--texts wants no 'z'"),
        (["x"], "deep: true\nlayers: 7", "{}: 7 layers cannot be deep"),
    ],
)
def test_what_is_refused_is_named(words: list[str], config: str | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        parse(*words, config=config, folder=tmp_path)
    assert said.format(tmp_path / "c.yaml") in str(error.value) and "\n" not in str(error.value)


def test_a_file_may_be_the_first_argument(tmp_path: Path) -> None:
    assert parse("x", "--lr", "2", config="lr: ${oc.env:NOT_SET}", folder=tmp_path).lr == 2
    (tmp_path / "c.yml").write_text(FILE, encoding="utf-8")
    assert parse(str(tmp_path / "c.yml")).data == Path("o/d")
    moved = parse(str(tmp_path / "c.yml"), "x", "--lr", "0.25")
    assert (moved.data, moved.lr, moved.names) == (Path("x"), 0.25, ("a", "b"))
    (tmp_path / "folder.yaml").mkdir()
    assert parse(str(tmp_path / "folder.yaml")).data == tmp_path / "folder.yaml"
    with pytest.raises(OSError, match=r"gone\.yaml"):
        parse("gone.yaml")
    with pytest.raises(ValueError, match="unrecognized arguments: y"):
        parse(str(tmp_path / "c.yml"), "x", "y")


def test_a_flag_is_also_the_value_above_the_sections(tmp_path: Path) -> None:
    text = "kind: ???\ncompare: {data: 'd/${kind}', kind: '${kind}'}"
    found = parse("--kind", "two", config=text, folder=tmp_path)
    assert (found.data, found.kind) == (Path("d/two"), "two")
    with pytest.raises(ValueError, match=r"c.yaml: compare.data: .*kind"):
        parse(config=text, folder=tmp_path)
