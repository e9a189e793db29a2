#!/usr/bin/env bash
# An OPUS-MT model fine-tuned on WMT16, plain and with AD-DROP, and scored before and after on raw references:
#
#     scripts/opus_mt.sh en-ro|tr-en [--source FOLDER|hub] [--limit N] [--source-prefix '>>ron<<']
#                        [any other flag of `attn-reg prepare wmt16` or `attn-reg compare`] [-- flags of fairseq-train]
#
# HF_MODEL names the model: a folder as the Hugging Face hub has it, or a name on the hub, which is downloaded
# (Helsinki-NLP/opus-mt-en-ro, Helsinki-NLP/opus-mt-tr-en by default). Fine-tuned as in the AD-DROP paper: 5 epochs,
# batches of 16 pairs of at most 128 pieces, learning rate 2e-5 decaying to 0, weight decay 0.01; en-ro with p 0.2
# and q 0.2, tr-en with p 0.6 and q 0.1. Everything is kept in runs/opus-mt-PAIR, or in the folder of --out.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
usage() {
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit "$1"
}

case ${1:-} in
    en-ro) p=0.2 q=0.2 ;;
    tr-en) p=0.6 q=0.1 ;;
    -h | --help) usage 0 ;;
    *)
        echo "opus_mt.sh: the first argument must be en-ro or tr-en, given: ${1:-nothing}" >&2
        exit 2
        ;;
esac
pair=$1 && shift

model=${HF_MODEL:-Helsinki-NLP/opus-mt-$pair}
out=$root/runs/opus-mt-$pair
epochs=5 batch=16
prepare=(--source hub --max-pieces 128) compare=() generate=""
while (($#)); do
    case $1 in
        --) shift && break ;;
        -h | --help) usage 0 ;;
        --strict | --overwrite) prepare+=("$1") && shift && continue ;;
        --cpu) compare+=("$1") && shift && continue ;;
        --*=*) words=("${1%%=*}" "${1#*=}") count=1 ;;
        --*)
            (($# > 1)) || { echo "opus_mt.sh: $1 wants a value" >&2 && exit 2; }
            words=("$1" "$2") count=2
            ;;
        *) echo "opus_mt.sh: unexpected argument: $1" >&2 && exit 2 ;;
    esac
    case ${words[0]} in
        --out) out=${words[1]} ;;
        --epochs) epochs=${words[1]} ;;
        --batch-size) batch=${words[1]} ;;
        --generate-flags) generate=${words[1]} ;;
        --source | --limit | --origin | --workers | --max-pieces | --max-ratio | --romanian | --source-prefix)
            prepare+=("${words[@]}")
            ;;
        *) compare+=("${words[@]}") ;;
    esac
    shift "$count"
done

"$root/scripts/setup.sh"
export PATH="${ATTN_REG_VENV:-$root/.venv}/bin:$PATH"

mkdir -p "$out"
if [[ -d $out/model && -f $out/model.name && $(<"$out/model.name") != "$model" ]]; then
    echo "opus_mt.sh: $out was begun with $(<"$out/model.name"), not $model; give another --out" >&2
    exit 2
fi
if [[ ! -d $out/model ]]; then
    printf '%s\n' "$model" >"$out/model.name"
    if [[ -d $model ]]; then
        attn-reg convert opus-mt "$model" "$out/model" --languages "$pair"
    else
        attn-reg convert opus-mt --hf-model "$model" "$out/model" --languages "$pair"
    fi
fi
attn-reg prepare wmt16 --pair "$pair" --out "$out/data" --opus-mt "$out/model" "${prepare[@]}"

# the model's own sizes, and a learning rate that falls to 0 over all updates, which are counted for one process
read -ra shape <"$out/model/fairseq.flags"
pairs=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["splits"]["train"]["kept"])' \
    "$out/data/manifest.json")
updates=$((epochs * ((pairs + batch - 1) / batch)))
# (every process reads the checkpoint: what fairseq sends from the first to the others, torch.load refuses to read)
train=("${shape[@]}" --finetune-from-model "$out/model/checkpoint.pt" --load-checkpoint-on-all-dp-ranks --batch-size "$batch"
    --total-num-update "$updates" --adam-betas '(0.9, 0.999)' --distributed-world-size 1)

# from pieces to text as MarianTokenizer does it, and a translation may be empty or as long as Hugging Face allows
exec attn-reg compare "$out/data" --out "$out" --methods untuned,plain,ad_drop \
    --method-flags ad_drop="--ad-drop-p $p --ad-drop-q $q" \
    --epochs "$epochs" --lr 2e-5 --lr-scheduler polynomial_decay --warmup 0 --weight-decay 0.01 --label-smoothing 0 --beam 4 \
    --generate-flags "--post-process none --bpe opus_mt --opus-mt-folder $(printf %q "$out/data/opus_mt") \
--min-len 0 --max-len-b 510 $generate" \
    "${compare[@]}" -- "${train[@]}" "$@"
