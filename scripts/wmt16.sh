#!/usr/bin/env bash
# WMT16 from raw text to the table, plain training beside AD-DROP:
#
#     scripts/wmt16.sh en-ro|ro-en|en-tr|tr-en [--source FOLDER|hub] [--limit N] [--methods plain,ad_drop]
#                      [any other flag of `attn-reg prepare wmt16` or `attn-reg compare`] [-- flags of fairseq-train]
#
# The flags win over examples/wmt16/wmt16.yaml. Everything is kept in runs/wmt16-PAIR, or in the folder of --out.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
export PATH="${ATTN_REG_VENV:-$root/.venv}/bin:$PATH"
exec attn-reg run "$root/examples/wmt16/wmt16.yaml" --pair "$@"
