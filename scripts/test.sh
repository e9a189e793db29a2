#!/usr/bin/env bash
# Run the tests: scripts/test.sh [arguments of pytest]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
venv=${ATTN_REG_VENV:-$root/.venv}
export PATH="$venv/bin:$PATH"

# the models are tiny: one thread is fastest, and several waste a busy machine by waiting for each other
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

cd "$root"
exec "$venv/bin/python" -m pytest "$@" </dev/null
