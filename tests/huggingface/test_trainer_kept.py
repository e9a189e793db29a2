"""The kept probe, three faces: fairseq, Trainer and a loop of one's own keep the same regions of the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.huggingface_models import build
from tests.huggingface.test_trainer_faces import SEED, Seen, fairseq_step
from tests.huggingface.trainers import ad_drop, collate, examples, trainer_of, translating

KEPT = {"probe": "kept", "cross_tuning": "epoch"}


def regions(regularizer: Any) -> dict[bytes, tuple[Any, list[int]]]:
    """What is kept of each example."""
    return {digest: (kept.parts, kept.read().tolist()) for digest, kept in regularizer.kept.store._kept.items()}


class Kept(Seen):
    """What is kept after each step."""

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """No masks are kept on the sites."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.masks.append(regions(self.regularizer))


def kept_under_trainer(folder: Path, name: str, **options: Any) -> tuple[dict[bytes, Any], list[dict[str, float]]]:
    """Two epochs of one batch."""
    regularizer = ad_drop(**KEPT)
    seen = Kept(regularizer)
    arguments = {"max_steps": 2, "logging_steps": 1, "train_sampling_strategy": "sequential", **options}
    trainer = trainer_of(
        folder, name, regularizer, callbacks=(seen,), own={"train_dataset": examples(name, 4)}, **arguments
    )
    trainer.train()
    return seen.masks[0], trainer.state.log_history


def kept_in_a_loop(name: str) -> dict[bytes, Any]:
    model, regularizer = build(name, dropout=0.1), ad_drop(**KEPT)
    batch = (translating(model) if name == "marian" else collate)(examples(name, 4))
    regularizer.begin_epoch(1)
    with regularizer.attach(model):
        torch.manual_seed(SEED)
        model(**batch).loss.backward()
        regularizer.end_update()
        return regions(regularizer)


@pytest.mark.parametrize("name", ["bert", "marian"])
def test_trainer_and_a_loop_keep_the_same(tmp_path: Path, name: str) -> None:
    kept, log = kept_under_trainer(tmp_path, name)
    assert len(kept) == 4 and kept == kept_in_a_loop(name)
    sizes = [len(bits) for _, bits in kept.values()]
    assert log[0]["kept_bytes_per_example"] == sum(sizes) / 4 and "kept_hit_rate" not in log[0]
    assert log[1]["kept_hit_rate"] == 1 and log[1]["probe_share"] == 0 < log[1]["drop_encoder.self[0]"]


def test_fairseq_keeps_the_same(tmp_path: Path) -> None:
    pytest.importorskip("fairseq")
    task, *_ = fairseq_step("ad_drop", {"p": 0.5, "q": 0.5, **KEPT})
    task.regularizer.end_update()
    assert regions(task.regularizer) == kept_in_a_loop("bert")


def test_trainer_accumulates_and_smooths(tmp_path: Path) -> None:
    """All four examples of an update in batches of one; label smoothing takes the labels away."""
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "label_smoothing_factor": 0.1}
    kept, log = kept_under_trainer(tmp_path, "marian", **options)
    assert set(kept) == set(kept_in_a_loop("marian")) and log[1]["kept_hit_rate"] == 1
