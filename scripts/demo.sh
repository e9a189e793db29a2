#!/usr/bin/env bash
# Plain training, attention dropout, AD-DROP and AttendOut on a small noisy English-Romanian corpus, on 2 cores:
#
#     scripts/demo.sh [flags of `attn-reg compare`, which win over those below]
#
# Everything is kept in runs/demo: a second call shows the table at once, an interrupted one continues.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
export PATH="${ATTN_REG_VENV:-$root/.venv}/bin:$PATH"

# the models are tiny: one thread is fastest
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

cd "$root"
# a quarter of the targets belongs to other sentences, as in a crawled corpus: plain training memorizes them
attn-reg prepare phrasebook --pair en-ro --train 1500 --valid 300 --noise 0.25 --out runs/demo/data
# Each method's settings are those with the lowest validation loss on the corpus of another seed (--seed 101), out of
# attention dropout 0.15, 0.3; AD-DROP on all sites, every epoch, p/q 0.3/0.3, 0.3/0.6, 0.6/0.5; AttendOut on all sites,
# initial keep 0.9, 0.7.
exec attn-reg compare runs/demo/data --out runs/demo --jobs 2 \
    --methods plain,attention_dropout,ad_drop,attend_out \
    --method-flags "attention_dropout=--attention-dropout 0.15" \
    --method-flags "ad_drop=--attn-sites * --ad-drop-p 0.3 --ad-drop-q 0.3 --ad-drop-cross-tuning off" \
    --method-flags "attend_out=--attn-sites * --attend-out-initial-keep 0.9" \
    --layers 2 --embed-dim 128 --ffn-dim 256 --heads 4 --dropout 0.1 --label-smoothing 0 \
    --max-tokens 512 --epochs 18 --lr 2e-3 --warmup 200 "$@"
