#!/usr/bin/env bash
# Plain training, attention dropout, AD-DROP and AttendOut on a small noisy English-Romanian corpus, on 2 cores:
#
#     scripts/demo.sh [flags that win over examples/demo/demo.yaml]
#
# Everything is kept in runs/demo: a second call shows the table at once, an interrupted one continues.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export PATH="${ATTN_REG_VENV:-$PWD/.venv}/bin:$PATH" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # one thread: tiny models
unset PYTHONDONTWRITEBYTECODE # every training is a process of its own: what one compiles, the next one reads
exec attn-reg run examples/demo/demo.yaml "$@"
