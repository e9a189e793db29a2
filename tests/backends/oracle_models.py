"""Every model of transformers' auto-mappings made tiny: a default configuration, shrunken by the names of its options.

The oracle of `test_huggingface_oracle` compares a stock model with an attached one that drops nothing.
"""

import copy
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from attn_reg_plugin import ADDrop
from attn_reg_plugin.files import read_json

#: loss and all gradients
Step = tuple[Tensor, Tensor]
WORDS, PAD, CLASSES, LENGTH, IMAGE = 99, 1, 3, 7, 32

#: auto-mappings, by what their heads are given
HEADS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "answer": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
}

#: options by the whole of their name, and what they become; the first that matches counts
SHRUNKEN: list[tuple[str, Any]] = [
    (r"vocab_size|n_words|decoder_vocab_size|src_vocab_size|tgt_vocab_size|vocab_size_per_layer_input", WORDS),
    (r"pad_token_id|pad_index", PAD),
    (r"bos_token_id|bos_index|decoder_start_token_id|cls_token_id|forced_bos_token_id", 0),
    (r"eos_token_id|eos_index|sep_token_id|forced_eos_token_id", 2),
    (r"\w+_token_id|\w+_token_index|unk_index|mask_index", 3),
    (r"(q|kv|o|index)_lora_rank|o_lora_rank|\w*lora_rank", 16),
    (r"qk_head_dim|mamba_d_head|mamba_head_dim", 16),
    (
        r"qk_rope_head_dim|rotary_dim|qk_nope_head_dim|v_head_dim|head_dim|d_kv|\w*_head_dim|attention_head_size|kv_channels",
        8,
    ),
    (r"\w*num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts|moe_top_k", 2),
    (r"\w*num_experts|n_routed_experts|num_local_experts|moe_num_experts|ffn_num_experts", 4),
    (r"n_shared_experts|num_shared_experts|n_group|topk_group|first_k_dense_replace", 1),
    (r"(swin_)?depths|layers_block_nums", [1, 1]),
    (r"\w*num_(hidden_|encoder_|decoder_|attention_|blocks?_)?layers|n_layers?|depth|num_blocks", 2),
    (r"(num_)?(encoder|decoder|text|vision)_layers|num_hidden_groups", 2),
    (r"\w*num_key_value_heads|n_head_kv|num_kv_heads|n_kv_heads|multi_query_group_num|num_key_value_groups", 2),
    (r"\w*attention_heads|n_heads?|num_heads|\w+_num_heads|num_query_heads", 4),
    (
        r"\w*hidden_sizes?|d_model|dim|n_embd|emb_dim|d_embed|embed_dim|embedding_dim|word_embed_proj_dim|width|n_ctx_in",
        32,
    ),
    (r"embedding_size|hidden_size_per_layer_input|embedding_hidden_size|true_hidden_size|bottleneck_size", 32),
    (r"num_feedforward_networks", 1),
    (r"\w*intermediate_size|\w*ffn_dim|d_ff|hidden_dim|d_inner|ffn_hidden_size|dim_feedforward|n_inner|ff_dim", 48),
    (r"\w*ffn_hidden_size|intermediate_dim|mlp_hidden_size|lru_width|block_ff_dim", 32),
    (r"max_position_embeddings|n_positions|max_seq_len|max_sequence_length|max_source_positions|max_seq_length", 64),
    (r"max_target_positions|n_ctx|max_2d_position_embeddings|seq_length|max_seqlen", 64),
    (r"image_size|input_size", IMAGE),
    (r"patch_size|encoder_stride|patch_sizes", 8),
    (r"conv_dim", [16, 16]),
    (r"conv_kernel|conv_stride", [10, 5]),
    (r"num_feat_extract_layers", 2),
    (r"num_conv_pos_embeddings", 16),
    (r"num_conv_pos_embedding_groups", 2),
    (r"num_codevector\w*|codevector_dim|proj_codevector_dim|xvector_output_dim", 8),
    (r"\w*state_size|d_state|mamba_d_state|conv_l_cache", 8),
    (r"mamba_n_heads|mamba_num_heads|linear_num_(key|value)_heads", 4),
    (r"linear_(key|value)_head_dim", 8),
    (r"mamba_n_groups|n_groups", 1),
]
#: what becomes tiny also where the default is None
GIVEN = ("head_dim", "vocab_size")
#: lists that follow from other options, which are left to the configuration
DERIVED = ("layer_types", "mlp_layer_types", "block_types", "layers_block_type", "attn_layer_indices", "id2label")
DERIVED += ("label2id", "no_rope_layers", "architectures", "transformers_version", "model_type", "stage_names")
DERIVED += ("out_features", "out_indices", "indexer_types", "swin_window_size", "rope_parameters", "rope_scaling")


def pairs() -> Iterator[tuple[str, str, str]]:
    """(head, model type, class) of every row of the mappings."""
    for head, mapping in HEADS.items():
        for kind, classes in getattr(modeling_auto, mapping).items():
            for name in dict.fromkeys(classes if isinstance(classes, list | tuple) else [classes]):
                yield head, kind, name


def records() -> dict[str, dict[str, Any]]:
    """Read the records of every `head/model type/class` that `scripts/models.py` made last."""
    return read_json(Path(__file__).parents[2] / "docs" / "models.json")["models"]


def shrunken(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a configuration that are not its defaults, when it is tiny; of a nested one too."""
    small: dict[str, Any] = {}
    for name, value in options.items():
        if name in DERIVED or name.startswith("_"):
            continue
        if isinstance(value, dict):
            if name.endswith("config") or "model_type" in value:
                small[name] = shrunken(value) | {"model_type": value["model_type"]} if "model_type" in value else value
            continue
        if name == "apply_spec_augment":  # the probe and the forward would draw different masks
            small[name] = False
            continue
        if "drop" in name and isinstance(value, float):
            small[name] = 0.0
            continue
        found = next((new for pattern, new in SHRUNKEN if re.fullmatch(pattern, name)), None)
        if found is None or isinstance(value, bool) or (value is None and "token" not in name and name not in GIVEN):
            continue
        if name == "num_key_value_heads" and "kv_lora_rank" in options:
            found = 4  # keys of latent attention are no fewer than queries
        if isinstance(found, list) != isinstance(value, list | tuple) and not isinstance(value, int):
            small[name] = [found] * 2 if isinstance(found, int) else found
        elif not isinstance(found, list) or isinstance(value, list | tuple):
            small[name] = found
    return small


#: DeBERTa's published models, unlike its default configuration
_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
#: what a family needs besides, by model type: it follows from no name
NEEDED: dict[str, dict[str, Any]] = {
    **{kind: {"window_size": 2, "patch_size": 4, "num_heads": [2, 4]} for kind in ("swin", "swinv2", "donut-swin")},
    **{kind: {"num_hidden_layers": 4} for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear")},
    **{kind: {"num_hidden_layers": 3} for kind in ("recurrent_gemma", "lfm3")},
    **{kind: {"per_layer_config": None} for kind in ("gemma4_text", "dots3_note_text")},
    "data2vec-audio": {"mask_time_prob": 0.0},  # numpy's random numbers: the probe and the forward would differ
    "deberta": _DISENTANGLED,
    "deberta-v2": _DISENTANGLED | {"position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    **{kind: {"attention_window": 4} for kind in ("longformer", "led")},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "esmc": {"num_key_value_heads": 4},
    "pegasus_x": {"block_size": 8, "num_global_tokens": 4},
    "jamba": {"num_hidden_layers": 8},
    "nemotron": {"num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mobilebert": {"hidden_size": 32, "embedding_size": 32, "intra_bottleneck_size": 32},
    "esm": {"vocab_size": WORDS, "position_embedding_type": "rotary"},
    "xmod": {"default_language": "en_XX"},
}


def tiny_config(kind: str, **options: Any) -> Any:
    """A configuration of a model type, shrunken and without dropout, with these options."""
    default = transformers.AutoConfig.for_model(kind)
    options = shrunken(default.to_dict()) | NEEDED.get(kind, {}) | options
    if getattr(default, "is_encoder_decoder", False):
        options["decoder_start_token_id"] = PAD
    return type(default)(**options)


def tiny(head: str, kind: str, name: str, attention: str = "sdpa") -> nn.Module:
    """A tiny model in training mode, in fp32, its attention maps far from uniform.

    Raises:
        Exception: it cannot be built so; whatever the model says.
    """
    config = tiny_config(kind, **({"num_labels": CLASSES} if head != "answer" else {}))  # an answer has two
    if head == "causal" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    torch.manual_seed(1)
    model_class = getattr(transformers, name)
    if head != "image" and head != "ctc":
        config.pad_token_id = PAD
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class._from_config(copy.deepcopy(config)).parameters())
    if size > 20_000_000:
        raise ValueError("it still has more than 20,000,000 parameters")
    try:
        model = model_class._from_config(copy.deepcopy(config), attn_implementation=attention)
    except ValueError:
        model = model_class._from_config(config, attn_implementation="eager")
    for part in model.modules():
        if isinstance(part, nn.Dropout):  # some heads have a probability of their own
            part.p = 0.0
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.dim() == 2 and "norm" not in part:
                parameter.normal_(std=0.15)
            elif parameter.dim() == 1 and not torch.isfinite(parameter).all():
                parameter.zero_()
    return model.float().train()


def ids(lengths: list[int], size: int, seed: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids (B, size) that are no special token, and their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, WORDS, (len(lengths), size), generator=generator)
    places = torch.arange(size)
    sizes = torch.tensor(lengths).unsqueeze(-1)
    real = places >= size - sizes if left else places < sizes
    return tokens.masked_fill(~real, PAD), real.long()


def batch(head: str, model: nn.Module, left: bool = False) -> dict[str, Tensor]:
    """Three examples of unequal lengths, as the head takes them."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.tensor([0, 2, 1])
    if head == "image":
        return {"pixel_values": torch.randn(3, 3, IMAGE, IMAGE, generator=generator), "labels": labels}
    if head == "ctc":
        return _sounds(model, generator)
    tokens, mask = ids([LENGTH, 4, 2], LENGTH, 2, left)
    inputs, real, places = {"input_ids": tokens, "attention_mask": mask}, mask.bool(), torch.arange(LENGTH)
    first = torch.where(real, places, LENGTH).min(-1).values
    if head == "sequence" and model.config.is_encoder_decoder:
        tokens[torch.arange(3), (places * real).max(-1).values] = model.config.eos_token_id
    if model.config.model_type == "longformer":
        inputs["global_attention_mask"] = (places == first.unsqueeze(-1)).long()
    if head == "choice":
        inputs = {key: value.unsqueeze(1).expand(3, 2, LENGTH).clone() for key, value in inputs.items()}
        others = (tokens + 1).clamp(max=WORDS - 1)  # of equal choices all gradients would be rounding errors
        inputs["input_ids"][:, 1] = others.masked_fill(~real, PAD)
        return inputs | {"labels": torch.tensor([0, 1, 1])}
    if head == "answer":
        return inputs | {"start_positions": first, "end_positions": first + 1}
    if head == "sequence":
        return inputs | {"labels": labels}
    target = tokens % CLASSES if head == "token" else tokens
    known = real & (places > first.unsqueeze(-1)) if left else real  # no token before the first predicts it
    return inputs | {"labels": target.masked_fill(~known, -100)}


def _sounds(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(4, 20, (2, 2), generator=generator)
    if model.main_input_name == "input_values":
        mask = (torch.arange(600) < torch.tensor([[600], [400]])).long()
        return {"input_values": torch.randn(2, 600, generator=generator), "attention_mask": mask, "labels": labels}
    width = getattr(model.config, "feature_projection_input_dim", None) or getattr(model.config, "num_mel_bins", 80)
    mask = (torch.arange(40) < torch.tensor([[40], [24]])).long()
    return {"input_features": torch.randn(2, 40, width, generator=generator), "attention_mask": mask, "labels": labels}


def accepted(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Select the `inputs` that the model's forward names."""
    names = inspect.signature(model.forward).parameters
    return {key: value for key, value in inputs.items() if key in names}


def step(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    """The loss and every gradient, in one vector each; a parameter without one has zeros."""
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return loss.detach().float(), torch.cat([gradient.flatten().float() for gradient in gradients])


def outcome(head: str, kind: str, name: str, attention: str = "sdpa") -> str:
    """Attach with nothing dropped and say what that does to the model: `same`, or what else and why.

    `unbuilt`: the tiny stock model does not train; `refused`: at the start, by a sentence; `raised`: in training;
    `differs`: loss or gradients are not the stock model's; `idle`: no site had a mask.
    """
    try:
        model = tiny(head, kind, name, attention)
        step(copy.deepcopy(model), accepted(model, batch(head, model)))
    except Exception as error:
        return f"unbuilt: {type(error).__name__}: {str(error)[:150]}"
    lefts = (False,) if head in ("image", "ctc") else (False, True)
    exact: Step | None = None
    for dtype, left in [(torch.float32, left) for left in lefts] + [(torch.bfloat16, False)]:
        stock, attached = copy.deepcopy(model).to(dtype), copy.deepcopy(model).to(dtype)
        inputs = accepted(model, batch(head, model, left))
        inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
        try:
            expected = step(stock, inputs)
        except Exception:
            continue  # where the stock model does not run, in bf16 or padded on the left, there is nothing to compare
        exact = exact or expected
        # in bfloat16 the stock model itself is off by its rounding
        noise = (1e-4,) * 2 if dtype == torch.float32 else tuple(max(0.1, 2 * x) for x in apart(expected, exact))
        found = compare(attached, inputs, expected, noise)
        if found != "same":
            return f"{found} ({'bf16' if dtype == torch.bfloat16 else 'left' if left else 'right'})"
    return "same"


def apart(first: Step, second: Step) -> tuple[float, float]:
    """How far apart losses and gradients of two steps are, relative to those of the second."""
    distances = [(a - b).norm() / b.norm().clamp(min=1e-8) for a, b in zip(first, second, strict=True)]
    return float(distances[0]), float(distances[1])


def compare(model: nn.Module, inputs: dict[str, Tensor], expected: Step, tolerance: tuple[float, ...]) -> str:
    """Train one step with nothing dropped, and compare it with the stock model's."""
    regularizer = ADDrop(p=0.5, q=1e-30, sites="*", cross_tuning="off")
    try:
        attachment = regularizer.attach(model)
    except ValueError as error:
        return f"refused: {error}"
    with attachment:
        try:
            found = step(model, inputs)
        except Exception as error:
            return f"raised: {type(error).__name__}: {str(error)[:150]}"
        if not any(site.keep is not None for site in regularizer.attached_sites):
            return "idle"
    loss, gradients = apart(found, expected)
    if not (loss < tolerance[0] and gradients < tolerance[1]):
        return f"differs: loss by {loss:.1e}, gradients by {gradients:.1e}"
    return "same"
