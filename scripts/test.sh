#!/usr/bin/env bash
# Run the tests: scripts/test.sh [arguments of pytest; -n 0 for a single process]
#
# ATTN_REG_TEST_WORKERS  processes (default: 2)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
venv=${ATTN_REG_VENV:-$root/.venv}
export PATH="$venv/bin:$PATH"

# the models are tiny: one thread is fastest, and several waste a busy machine by waiting for each other
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# every command under test is a process of its own: what one compiles, the next one reads
unset PYTHONDONTWRITEBYTECODE

cd "$root"
# a file stays in one process, so that what its tests share is made once; tests/conftest.py puts the long ones first
exec "$venv/bin/python" -m pytest -n "${ATTN_REG_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@" </dev/null
