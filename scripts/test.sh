#!/usr/bin/env bash
# Run the tests: scripts/test.sh [arguments of pytest]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
venv=${ATTN_REG_VENV:-$root/.venv}
export PATH="$venv/bin:$PATH"

cd "$root"
exec "$venv/bin/python" -m pytest "$@" </dev/null
