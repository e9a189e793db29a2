"""The settings of `attn-reg bench`, and the batches of its models; they need no torch, so that help is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from attn_reg_plugin.configuration import setting


class Batch(NamedTuple):
    """The defaults of the settings of a size."""

    vocabulary: int
    batch: int
    length: int


_TINY = Batch(vocabulary=50, batch=4, length=8)
#: family -> size -> batch; base: Vaswani et al. 2017, Devlin et al. 2019; tiny: for a quick check
BATCHES = {
    "fairseq": {"base": Batch(vocabulary=8000, batch=16, length=64), "tiny": _TINY},
    "bert": {"base": Batch(vocabulary=30522, batch=16, length=128), "tiny": _TINY},
}


@dataclass
class Settings:
    """Settings of the training that is measured, and of the measurement.

    Raises:
        ValueError: a value does not go with another, or with this machine.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg bench --family bert --methods plain,ad_drop,attend_out --repeats 5",
        "attn-reg bench --device cuda --dtype bfloat16 --json costs.json",
    )

    family: str = setting(
        "fairseq's Transformer, or Hugging Face's BERT as a classifier", "fairseq", choices=tuple(BATCHES)
    )
    size: str = setting("of the model", "base", choices=("base", "tiny"))
    batch: int | None = setting(
        "sentences or pairs (default, as of --length and --vocabulary: of the size)", None, within="[1, inf)"
    )
    length: int | None = setting("tokens of the longest source and target", None, within="[2, inf)")
    shortest: float = setting("tokens of the shortest, as a fraction of --length; 1: no padding", 0.75, within="(0, 1]")
    vocabulary: int | None = setting("words of the vocabulary", None, within="[8, inf)")
    dropout: float = setting("of the model", 0.1, within="[0, 1)")
    device: str = setting("where", "cpu", choices=("cpu", "cuda"))
    dtype: str = setting("of parameters and computation", "float32", choices=("float32", "bfloat16"))
    threads: int | None = setting("of PyTorch on the CPU (default: PyTorch's)", None, within="[1, inf)")
    clock: str = setting(
        "wall: elapsed time; cpu: CPU time of this process, for a busy machine (best with --threads 1)",
        "wall",
        choices=("wall", "cpu"),
    )
    repeats: int = setting("measured steps per method", 7, within="[1, inf)")
    warmup: int = setting("steps before, not counted", 1, within="[0, inf)")
    methods: tuple[str, ...] | None = setting(
        "which, with commas (default: all), see --list-methods", None, metavar="NAMES"
    )
    json: Path | None = setting("write everything measured to FILE as well", None, metavar="FILE")

    def __post_init__(self) -> None:
        """Take what is not given from the size, and check what goes together."""
        size = BATCHES[self.family][self.size]
        self.batch, self.length = self.batch or size.batch, self.length or size.length
        self.vocabulary = self.vocabulary or size.vocabulary
        if self.clock == "cpu" and self.device == "cuda":
            raise ValueError("--clock is cpu, but --device is cuda, whose work it does not see; use --clock wall")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise ValueError(f"--json: the folder {self.json.absolute().parent} does not exist")

    def carry_out(self) -> None:
        """Measure the methods, print the table, and write the file that is asked for; see `benchmark.publish`."""
        from attn_reg_plugin.bench.benchmark import publish

        publish(self)
