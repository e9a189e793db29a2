"""TRL: SFT with packing and completion-only loss, DPO, rewards and GRPO, with and without LoRA."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from datasets import Dataset

from attn_reg_plugin.huggingface import AttnRegCallback
from attn_reg_plugin.regularizers import AttendOut
from tests.clients.tiny import QUIET, check_client, check_saved, folder_of, sentences, tokenizer

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.clients

TEXT, CHOSEN, REJECTED = sentences(40), sentences(40, 2), sentences(40, 3)
LIKELIHOODS = "the outputs' log_probs, of the gold labels"
#: of each client: what it trains on, its settings, and what the log says
CLIENTS: dict[str, tuple[str, dict[str, list[str]], dict[str, Any], str]] = {
    "sft": ("SFT", {"text": TEXT}, {"max_length": 20}, LIKELIHOODS),
    "packed": ("SFT", {"text": TEXT}, {"max_length": 20, "packing": True}, LIKELIHOODS),
    "completion": ("SFT", {"prompt": TEXT, "completion": CHOSEN}, {"max_length": 30}, LIKELIHOODS),
    "dpo": ("DPO", {"prompt": TEXT, "chosen": CHOSEN, "rejected": REJECTED}, {"max_length": 30}, LIKELIHOODS),
    "reward": (
        "Reward",
        {"chosen": CHOSEN, "rejected": REJECTED},
        {"max_length": 30},
        "the predicted values: outputs of shape",
    ),
    "grpo": ("GRPO", {"prompt": TEXT}, {"num_generations": 2, "max_completion_length": 6}, LIKELIHOODS),
}


def variety(completions: list[str], **others: Any) -> list[float]:
    """A reward of completions."""
    return [float(len(set(completion.split()))) for completion in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    shared = {"num_key_value_heads": 2, "attention_dropout": 0.1}
    folder_of(made / "DPO", "LlamaForCausalLM", **shared)
    folder_of(made / "Reward", "LlamaForSequenceClassification", num_labels=1, **shared)
    return made


def make(folder: Path, client: str, lora: bool, callbacks: list[Any], options: dict[str, Any], **own: Any) -> Any:
    kind, columns, settings, _ = CLIENTS[client]
    rewards = kind == "Reward"
    auto = transformers.AutoModelForSequenceClassification if rewards else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder / ("Reward" if rewards else "DPO"))
    if lora:
        task = "SEQ_CLS" if rewards else "CAUSAL_LM"
        own["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)
    if kind == "GRPO":
        own["reward_funcs"] = variety
    config = getattr(trl, f"{kind}Config")(output_dir=str(folder / "out"), **{**QUIET, **settings, **options})
    data = Dataset.from_dict(columns)
    return getattr(trl, f"{kind}Trainer")(
        model=model, args=config, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks, **own
    )


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_trainer_of_trl(folder: Path, tmp_path: Path, client: str, lora: bool, caplog: Any) -> None:
    ours = check_client(partial(make, folder, client, lora), "decoder.self", CLIENTS[client][3], caplog)
    with caplog.at_level("ERROR"):
        ours.save_model(str(tmp_path))
    if lora:
        loaded: Any = peft.AutoPeftModelForCausalLM
        if client == "reward":
            loaded = peft.AutoPeftModelForSequenceClassification
        loaded = loaded.from_pretrained(tmp_path, **({"num_labels": 1} if client == "reward" else {}))
    else:
        loaded = type(ours.model).from_pretrained(tmp_path)
    check_saved(tmp_path, ours.model, loaded)


def test_a_copy_of_the_attacker_is_refused_at_the_start(folder: Path) -> None:
    method = AttendOut(steps=2, sites="decoder.self", reward_subset="train[50%:]")
    trainer = make(folder, "sft", False, [AttnRegCallback(method)], {})
    with pytest.raises(ValueError, match=r"the forward of LlamaForCausalLM .* was replaced by .*, as TRL's"):
        trainer.train()
    assert trainer.state.global_step == 0 and not method.attached_sites
