"""Trainings of scripts/architectures.py: a row for each of fairseq's models and tasks, and why others are not tried."""

from __future__ import annotations

from dataclasses import dataclass

ENCODER = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2"
DECODER = "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2"
BOTH = f"{ENCODER} {DECODER}"
SMOOTHED = "--criterion label_smoothed_cross_entropy"
BLOCKS = "--tokens-per-sample 16"
NAT = f"{BOTH} --criterion nat_loss --share-all-embeddings --noise"
CODES = "--input-feat-per-channel 8 --input-channels 1 --conv-channels 16"


@dataclass(frozen=True)
class Row:
    """A training: a task and an architecture of fairseq's, the data, the sites, and the flags that make it small."""

    task: str
    arch: str
    flags: str
    data: str = "text"
    sites: str = "*"


TRANSLATION = [
    Row("translation", "transformer", f"{BOTH} {SMOOTHED}"),
    Row(
        "translation", "transformer_align", f"{BOTH} {SMOOTHED} --alignment-layer 0", sites="encoder.self decoder.self"
    ),
    Row("translation", "bart_base", f"{BOTH} {SMOOTHED} --share-all-embeddings"),
    Row("translation", "lstm", f"{SMOOTHED} --encoder-embed-dim 16 --decoder-embed-dim 16 --decoder-out-embed-dim 16"),
    Row("translation", "fconv", f"{SMOOTHED} --encoder-layers [(16,3)] --decoder-layers [(16,3)]"),
    Row("translation", "fconv_self_att", f"{SMOOTHED} --encoder-layers [(16,3)] --decoder-layers [(16,3)]"),
    Row(
        "translation",
        "lightconv",
        f"{BOTH} {SMOOTHED} --encoder-conv-dim 16 --decoder-conv-dim 16 --encoder-kernel-size-list [3] "
        "--decoder-kernel-size-list [3]",
    ),
    Row("translation_lev", "levenshtein_transformer", f"{NAT} random_delete"),
    Row("translation_lev", "insertion_transformer", f"{NAT} random_delete"),
    Row("translation_lev", "cmlm_transformer", f"{NAT} random_mask"),
    Row("translation_lev", "nonautoregressive_transformer", f"{NAT} full_mask"),
    Row("translation_lev", "iterative_nonautoregressive_transformer", f"{NAT} full_mask"),
    Row(
        "translation_lev",
        "nacrf_transformer",
        f"{NAT} full_mask --word-ins-loss-factor 0.5 --crf-lowrank-approx 4 --crf-beam-approx 4",
    ),
    Row("translation_from_pretrained_bart", "bart_base", f"{BOTH} {SMOOTHED} --langs en,ro --share-all-embeddings"),
    Row("translation_from_pretrained_xlm", "transformer", f"{BOTH} {SMOOTHED}"),
    Row("multilingual_translation", "multilingual_transformer", f"{BOTH} {SMOOTHED} --lang-pairs en-ro"),
    Row(
        "translation_multi_simple_epoch",
        "transformer",
        f"{BOTH} {SMOOTHED} --langs en,ro --lang-pairs en-ro --encoder-langtok tgt",
    ),
    Row(
        "online_backtranslation",
        "transformer",
        f"{BOTH} {SMOOTHED} --mono-langs en,ro --valid-lang-pairs en-ro --share-all-embeddings",
    ),
    Row(
        "semisupervised_translation",
        "multilingual_transformer",
        f"{BOTH} {SMOOTHED} --lang-pairs en-ro --lambda-denoising-config 0",
    ),
    Row("simul_text_to_text", "transformer", f"{BOTH} {SMOOTHED}"),
    Row(
        "dummy_mt",
        "transformer",
        f"{BOTH} {SMOOTHED} --dict-size 24 --dataset-size 60 --src-len 6 --tgt-len 5",
        data="",
    ),
]
LANGUAGE_MODELS = [
    Row("language_modeling", "transformer_lm", f"{DECODER} {BLOCKS}", data="mono"),
    Row("language_modeling", "lightconv_lm", f"{DECODER} {BLOCKS} --decoder-kernel-size-list [3]", data="mono"),
    Row("language_modeling", "fconv_lm", f"{BLOCKS} --decoder-layers [(16,3)] --criterion cross_entropy", data="mono"),
    Row("language_modeling", "lstm_lm", f"{BLOCKS} --decoder-embed-dim 16 --decoder-hidden-size 16", data="mono"),
    Row("language_modeling", "hf_gpt2", f"{BLOCKS} --embed-dim 16 --num-layers 1 --num-attention-heads 2", data="mono"),
    Row(
        "multilingual_language_modeling", "transformer_lm", f"{DECODER} {BLOCKS} --multilang-sampling-alpha 0.5", "mono"
    ),
    Row("dummy_lm", "transformer_lm", f"{DECODER} {BLOCKS} --dict-size 24 --dataset-size 60", data=""),
    Row("masked_lm", "roberta_base", f"{ENCODER} {BLOCKS} --criterion masked_lm", data="mono"),
    Row("masked_lm", "xmod_base", f"{ENCODER} {BLOCKS} --criterion masked_lm", data="mono"),
    Row("multilingual_masked_lm", "roberta_base", f"{ENCODER} {BLOCKS} --criterion masked_lm", data="mono"),
    Row("dummy_masked_lm", "roberta_base", f"{ENCODER} {BLOCKS} --criterion masked_lm --dict-size 24", data=""),
    Row("legacy_masked_lm", "masked_lm", f"{ENCODER} {BLOCKS} --criterion legacy_masked_lm_loss", data="mono"),
    Row("cross_lingual_lm", "masked_lm", f"{ENCODER} {BLOCKS} --criterion legacy_masked_lm_loss", data="mono"),
    Row(
        "denoising",
        "bart_base",
        f"{BOTH} {BLOCKS} --share-all-embeddings --mask 0.3 --mask-length span-poisson",
        data="mono",
    ),
    Row(
        "multilingual_denoising",
        "bart_base",
        f"{BOTH} {BLOCKS} --share-all-embeddings --mask 0.3 --langs en,ro",
        data="mono",
    ),
    Row("span_masked_lm", "bart_base", f"{BOTH} {BLOCKS} --share-all-embeddings", data="mono"),
    Row(
        "sentence_prediction",
        "roberta_base",
        f"{ENCODER} --criterion sentence_prediction --num-classes 2 --init-token 0 --max-positions 64",
        data="classes",
    ),
    Row(
        "sentence_prediction_adapters",
        "xmod_base",
        f"{ENCODER} --criterion sentence_prediction --num-classes 2 --init-token 0 --max-positions 64",
        data="classes",
    ),
    Row(
        "sentence_ranking",
        "roberta_base",
        f"{ENCODER} --criterion sentence_ranking --num-classes 2 --init-token 0 --max-positions 64",
        data="ranking",
    ),
]
SPEECH = [
    Row("speech_to_text", "s2t_transformer", f"{BOTH} {SMOOTHED} --conv-channels 16", data="speech"),
    Row("speech_to_text", "s2t_conformer", f"{BOTH} {SMOOTHED} {CODES}", data="speech"),
    Row("speech_to_text", "convtransformer", f"{BOTH} {SMOOTHED} --input-feat-per-channel 8", data="speech"),
    Row("speech_to_text", "s2t_berard", f"{SMOOTHED} --lstm-size 16 --input-layers [16]", data="speech"),
    Row("simul_speech_to_text", "s2t_transformer", f"{BOTH} {SMOOTHED} --conv-channels 16", data="speech"),
]
ROWS = [*TRANSLATION, *LANGUAGE_MODELS, *SPEECH]

SOUNDS = "needs recordings"
#: models that no row trains
UNTRIED_MODELS = {
    "camembert": "roberta with other weights",
    "gottbert": "roberta with other weights",
    "xlmr": "roberta with other weights",
    "roberta_enc_dec": "has no flags that make it small",
    "transformer_from_pretrained_xlm": "needs a trained XLM",
    "dummy_model": "has no attention",
    "pipeline_parallel_transformer": "needs several GPUs and fairscale",
    **{f"model_parallel_{name}": "needs several GPUs and Megatron" for name in ("transformer", "transformer_lm")},
    "model_parallel_roberta": "needs several GPUs and Megatron",
    "transformer_ulm": "needs units of sounds",
    "speech_dlm": "needs units of sounds",
    **{name: SOUNDS for name in ("hubert", "hubert_ctc", "hubert_seq2seq", "wav2vec", "wav2vec2", "wav2vec_ctc")},
    **{name: SOUNDS for name in ("wav2vec_seq2seq", "wav2vec_classification", "wav2vec2_laser", "xm_transformer")},
    **{name: SOUNDS for name in ("unity_xm_transformer", "unity_conformer", "s2spect2_conformer", "s2ut_conformer")},
    **{name: SOUNDS for name in ("s2spect_conformer", "s2ut_transformer", "s2spect_transformer")},
    **{name: SOUNDS for name in ("fastspeech2", "tacotron_2", "tts_transformer", "CodeHiFiGANVocoder")},
}
#: tasks that no row trains
UNTRIED_TASKS = {
    "speech_unit_modeling": "needs units of sounds",
    "speech_dlm_task": "needs units of sounds",
    **{name: SOUNDS for name in ("audio_classification", "audio_finetuning", "audio_pretraining", "nlu_finetuning")},
    **{name: SOUNDS for name in ("hubert_pretraining", "speech_to_speech", "text_to_speech", "frm_text_to_speech")},
}
