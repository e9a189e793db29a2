"""`attn-reg report`: a page of experiments."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from attn_reg_plugin.configuration import setting
from attn_reg_plugin.files import write_text


@dataclass(frozen=True, kw_only=True)
class Report:
    """The settings of `attn-reg report`."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "attn-reg report runs/demo",
        "attn-reg report runs/first runs/second --out both.html --baseline attention_dropout",
    )

    runs: tuple[Path, ...] = setting("folders of attn-reg compare or finetune", metavar="OUT ...", positional=True)
    out: Path | None = setting("the page (default: report.html in the first OUT)", None, metavar="FILE.html")
    title: str = setting("above the page", "Training with attention regularizers")
    baseline: str = setting("what others are compared with", "plain", metavar="METHOD")

    def carry_out(self) -> None:
        """Write the page; a ValueError or FileNotFoundError says what is wrong, in one sentence."""
        from attn_reg_plugin.experiments.report.curves import load_matplotlib
        from attn_reg_plugin.experiments.report.page import page, read_experiment

        out = self.out or self.runs[0] / "report.html"
        if out.suffix not in (".html", ".htm"):
            raise ValueError(f"--out is {out}, but its name must end in .html or .htm")
        load_matplotlib()
        experiments = [read_experiment(folder, self.baseline) for folder in self.runs]
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page(experiments, self.title))
        for one in experiments:
            print(f"{one.title}: {len(one.rows)} methods, {len(one.finished)} of {len(one.runs)} runs finished")
            if len(one.rows) > 1 and self.baseline not in [row.method for row in one.rows]:
                said = f"no method is called {self.baseline!r}, so none is compared with it"
                print(f"{said}; --baseline names another")
        print(f"report: {out}")
