#!/usr/bin/env bash
# WMT16 from raw text to the table, plain training beside AD-DROP:
#
#     scripts/wmt16.sh en-ro|ro-en|en-tr|tr-en [--source FOLDER|hub] [--limit N] [--methods plain,ad_drop]
#                      [any other flag of `attn-reg prepare wmt16` or `attn-reg compare`] [-- flags of fairseq-train]
#
# A Transformer base unless sizes are given (--layers --embed-dim --ffn-dim --heads --max-tokens --epochs --lr
# --warmup --dropout --vocab-size ...). Everything is kept in runs/wmt16-PAIR, or in the folder of --out.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
usage() {
    sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit "$1"
}

case ${1:-} in
    en-ro | ro-en | en-tr | tr-en) pair=$1 && shift ;;
    -h | --help) usage 0 ;;
    *)
        echo "wmt16.sh: the first argument must be en-ro, ro-en, en-tr or tr-en, given: ${1:-nothing}" >&2
        exit 2
        ;;
esac

out=$root/runs/wmt16-$pair
prepare=(--source hub) compare=(--methods plain,ad_drop)
while (($#)); do
    case $1 in
        --) break ;;
        -h | --help) usage 0 ;;
        --strict | --overwrite) prepare+=("$1") && shift && continue ;;
        --cpu) compare+=("$1") && shift && continue ;;
        --*=*) words=("$1") ;;
        --*)
            (($# > 1)) || { echo "wmt16.sh: $1 wants a value" >&2 && exit 2; }
            words=("$1" "$2")
            ;;
        *) echo "wmt16.sh: unexpected argument: $1" >&2 && exit 2 ;;
    esac
    case $1 in
        --out) out=$2 ;;
        --out=*) out=${1#--out=} ;;
        --source | --source=* | --limit | --limit=* | --origin | --origin=* | --vocab-size | --vocab-size=* | \
            --spm | --spm=* | --spm-model | --spm-model=* | --dictionary | --dictionary=* | --workers | --workers=* | \
            --max-pieces | --max-pieces=* | --max-ratio | --max-ratio=* | --romanian | --romanian=* | \
            --character-coverage | --character-coverage=*)
            prepare+=("${words[@]}")
            ;;
        *) compare+=("${words[@]}") ;;
    esac
    shift "${#words[@]}"
done

"$root/scripts/setup.sh"
export PATH="${ATTN_REG_VENV:-$root/.venv}/bin:$PATH"
attn-reg prepare wmt16 --pair "$pair" --out "$out/data" "${prepare[@]}"
exec attn-reg compare "$out/data" --out "$out" "${compare[@]}" "$@"
