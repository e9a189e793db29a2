"""How far a comparison is: a rich progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attn_reg_plugin.experiments.training_log import TrainingLog


class Reporter:
    """Context manager; one bar per run, or one line per validation where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Reporter:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def start(self, title: str, epochs: int) -> RunProgress:
        """A run of `epochs` epochs begins; several may go on at a time, in threads."""
        return RunProgress(self.console, self._bars, title, epochs)


class RunProgress:
    """How far one run is."""

    def __init__(self, console: Console, bars: Progress, title: str, epochs: int) -> None:
        self._console, self._bars, self._title, self._epochs = console, bars, title, epochs
        self._seen = 0
        self._task = bars.add_task(title, total=epochs, detail="starting")
        self._line("training")

    def watch(self, log: TrainingLog) -> None:
        """The run's log has grown."""
        detail = f"epoch {min(int(log.position) + 1, self._epochs)}/{self._epochs}"
        if log.validations:
            (epoch, _), figures = max(log.validations.items())
            loss = "nll_loss" if "nll_loss" in figures else "loss"
            text = f"valid {loss} {figures.get(loss, float('nan')):.3f}"
            detail += f", {text}"
            if len(log.validations) > self._seen:
                self._seen = len(log.validations)
                self._line(f"epoch {epoch}/{self._epochs}, {text}")
        if log.position >= self._epochs:
            detail = "translating"
        self._bars.update(self._task, completed=log.position, detail=detail)

    def finish(self, summary: str) -> None:
        """The run is done."""
        self._bars.update(self._task, completed=self._epochs, total=self._epochs, detail=summary)
        self._line(summary)

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{self._title}: {text}", highlight=False, soft_wrap=True, markup=False)
