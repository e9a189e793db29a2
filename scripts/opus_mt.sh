#!/usr/bin/env bash
# An OPUS-MT model fine-tuned on WMT16, plain and with AD-DROP, and scored before and after on raw references:
#
#     scripts/opus_mt.sh en-ro|tr-en [--model FOLDER|NAME] [--source FOLDER|hub] [--limit N] [--source-prefix '>>ron<<']
#                        [any other flag of `attn-reg prepare wmt16` or `attn-reg compare`] [-- flags of fairseq-train]
#
# The flags win over examples/opus_mt/opus_mt.yaml. Everything is kept in runs/opus-mt-PAIR, or in the folder of --out.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
export PATH="${ATTN_REG_VENV:-$root/.venv}/bin:$PATH"
exec attn-reg run "$root/examples/opus_mt/opus_mt.yaml" --pair "$@"
