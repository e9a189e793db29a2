"""How far a comparison is: a rich progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from threading import Lock
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attn_reg_plugin.experiments.training_log import TrainingLog
from attn_reg_plugin.terminal import say


class Reporter:
    """Context manager; a bar over all runs and one for each at work, or lines where there is no terminal.

    Args:
        runs: how many there are.
    """

    def __init__(self, console: Console, runs: int = 1) -> None:
        self.console = console
        self._runs, self._done, self._lock = runs, 0, Lock()
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
        self._all = self._bars.add_task("all runs", total=self._runs, detail=self._count())
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def start(self, title: str, epochs: int) -> RunProgress:
        """A run of `epochs` epochs begins; several may go on at a time, in threads."""
        return RunProgress(self, self._bars, title, epochs)

    def finished(self, text: str) -> None:
        """One more run is done."""
        with self._lock:
            self._done += 1
            self._bars.update(self._all, completed=self._done, detail=self._count())
            self.say(f"{text} [{self._count()}]")

    def say(self, text: str) -> None:
        """Print a line; on a terminal above the bars."""
        say(self.console, text)

    def _count(self) -> str:
        return f"{self._done} of {self._runs} runs"


class RunProgress:
    """How far one run is."""

    def __init__(self, reporter: Reporter, bars: Progress, title: str, epochs: int) -> None:
        self._reporter, self._bars, self._title, self._epochs = reporter, bars, title, epochs
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
        """The run is done: its bar gives way to a line."""
        self._bars.remove_task(self._task)
        self._reporter.finished(f"{self._title}: {summary}")

    def set_aside(self, reason: str) -> None:
        """The run isn't done here, not now."""
        self._bars.remove_task(self._task)
        self._reporter.say(f"{self._title}: {reason}")

    def _line(self, text: str) -> None:
        if not self._reporter.console.is_terminal:
            self._reporter.say(f"{self._title}: {text}")
