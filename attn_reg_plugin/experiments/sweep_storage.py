"""Where the trials of a sweep are kept: a storage of Optuna's, an SQLite file or any database that it knows."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from attn_reg_plugin.files import alone_in


def load_optuna() -> ModuleType:
    """Optuna, which only sweeps need, without its messages.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ValueError("a sweep needs optuna, which is not installed; `pip install optuna` brings it") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def sqlite_url(path: Path) -> str:
    """The URL of an SQLite file."""
    load_optuna()
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(path)).render_as_string()


def without_password(url: str) -> str:
    """A storage's URL as it may be shown."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url


def open_storage(url: str, folder: Path) -> Any:
    """Optuna's storage at a URL; tables that are missing are made there.

    Args:
        folder: where processes of one machine wait for each other, so that only one of them makes the tables.

    Raises:
        ValueError: there is no such storage, or it isn't one.
    """
    optuna = load_optuna()
    options = {"connect_args": {"timeout": 120}} if url.startswith("sqlite") else {}
    try:
        with alone_in(folder, "storage.lock"):
            return optuna.storages.get_storage(optuna.storages.RDBStorage(url, engine_kwargs=options))
    except OSError:
        raise
    except Exception as error:  # of SQLAlchemy, of a driver, of Optuna
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"storage {without_password(url)} cannot be opened: {reason}") from None
