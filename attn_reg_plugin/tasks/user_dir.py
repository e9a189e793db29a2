"""The plugin as fairseq has it by `--user-dir`, registered in this process."""

from __future__ import annotations

from pathlib import Path

from fairseq.models import import_models
from fairseq.tasks import import_tasks

#: what `--user-dir` names
USER_DIR = Path(__file__).resolve().parents[1]


def register_plugin() -> None:
    """Register the tasks and models with fairseq, under the package's own name."""
    import_tasks(str(USER_DIR / "tasks"), f"{USER_DIR.name}.tasks")
    import_models(str(USER_DIR / "models"), f"{USER_DIR.name}.models")
