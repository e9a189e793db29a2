#!/usr/bin/env bash
# Plain training, attention dropout, AD-DROP and AttendOut on a small English-Romanian corpus, some minutes on 2 cores:
#
#     scripts/demo.sh [flags of `attn-reg compare`, which win over those below]
#
# Everything is kept in runs/demo: a second call shows the table at once, an interrupted one goes on.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
export PATH="${ATTN_REG_VENV:-$root/.venv}/bin:$PATH"

# the models are tiny: one thread is fastest
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

cd "$root"
attn-reg prepare phrasebook --pair en-ro --out runs/demo/data
exec attn-reg compare runs/demo/data --out runs/demo --methods plain,attention_dropout,ad_drop,attend_out \
    --layers 2 --embed-dim 128 --ffn-dim 256 --heads 4 --dropout 0.1 \
    --max-tokens 1024 --epochs 8 --lr 2e-3 --warmup 200 "$@"
