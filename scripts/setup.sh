#!/usr/bin/env bash
# Make the virtual environment of this repository at the versions of requirements.txt; a second call returns at once.
#
# ATTN_REG_VENV         where (default: .venv in the repository)
# PYTHON                interpreter to make it with, 3.11 or 3.12 (default: whichever is found)
# ATTN_REG_MIN_DISK_GB  free space to ask for before installing (default: 4)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${ATTN_REG_VENV:-$root/.venv}
requirements=$root/scripts/requirements.txt stamp=$venv/.setup-stamp log=$venv/setup.log # the log also marks the folder as made by this script
advice="fairseq is built from source on Python 3.11, which needs a C++ compiler and the headers of Python (packages \
g++ and python3-dev); or use Python 3.12, for which nothing is built"

die() { printf 'setup: %s\n' "$*" >&2 && exit 1; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null || true; }
run() { # a command with its output in the log; a failure is told in one sentence
    "$@" >"$log" 2>&1 </dev/null && return
    grep -q "No space left" "$log" && die "the disk is full; free some space and run this again (see $log)."
    grep -qE "[Ff]ailed to fetch|sending request|NewConnection|[Tt]imed out|SSLError|ProxyError" "$log" &&
        die "the package index cannot be reached; check the network and \`pip config list\` (see $log)."
    grep -qE "Python\.h: No such|unable to execute|command '.*' failed: No such" "$log" && die "$advice (see $log)."
    die "the installation failed: $(grep -iE '^ *(error|cause|caused by):' "$log" | tail -n 2 | tr -s '\n ' ' ')(see $log)."
}
uv() { "$venv/bin/uv" pip install --python "$venv/bin/python" --index-strategy unsafe-best-match "$@"; }
pins() { grep -iE "^($1)==" "$requirements"; }

candidates=(python3.12 python3.11 python3) && [[ ! -f $stamp ]] || candidates=("$venv/bin/python" "${candidates[@]}")
for python in "${PYTHON:-${candidates[@]}}"; do
    version=$(version_of "$python") && [[ $version != 3.1[12] ]] || break
done
[[ $version == 3.1[12] ]] || die "$python is ${version:-no Python that runs}; Python 3.11 or 3.12 is needed."
wanted=$({ echo "$version $root" && cat "$requirements" "$root/setup.py"; } | cksum)
if [[ -x $venv/bin/python && -f $stamp && $(cat "$stamp") == "$wanted" ]]; then exit; fi

[[ -z $(ls -A "$venv" 2>/dev/null) || -f $log ]] || die "$venv was not made by this script; set ATTN_REG_VENV."
mkdir -p "$venv" && free=$(($(df -Pk "$venv" | awk 'NR == 2 { print $4 }') >> 20)) needed=${ATTN_REG_MIN_DISK_GB:-4}
((free >= needed)) || rmdir "$venv" 2>/dev/null || true
((free >= needed)) || die "only $free GB are free where $venv goes; $needed GB are needed."
if [[ ! -f $stamp || $(version_of "$venv/bin/python") != "$version" ]]; then # new, interrupted or of another Python
    echo "setup: making $venv with Python $version"
    : >"$log" && find "$venv" -mindepth 1 ! -path "$log" -delete
    run "$python" -m venv "$venv"
fi
rm -f "$stamp"
run "$venv/bin/python" -m pip install "$(pins uv)"
while read -r name setting; do # uv does not read pip's configuration, whose environment variables come first
    value=$("$venv/bin/python" -m pip config list | sed -nE "s/^[:a-z]+\.$setting='(.*)'$/\1/p" | head -n 1)
    [[ -n ${!name:-} || -z $value ]] || export "$name=${value//\\n/ }"
done <<<$'UV_DEFAULT_INDEX index-url\nUV_INDEX extra-index-url\nUV_FIND_LINKS find-links\nSSL_CERT_FILE cert'
export UV_FIND_LINKS=${UV_FIND_LINKS// /,}
header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
if ! { command -v c++ || command -v g++ || command -v clang++; } >/dev/null || [[ ! -f $header ]]; then
    uv --dry-run --no-deps --only-binary :all: "$(pins fairseq-fixed)" >"$log" 2>&1 || die "$advice."
fi
echo "setup: torch and the build tools (the long download), then the other packages"
run uv -c "$requirements" $(pins "torch|numpy|cython|setuptools|wheel")
# fairseq is compiled with the torch just installed; its torchaudio, if made for another torch, breaks transformers
run uv --excludes <(echo torchaudio) --no-build-isolation-package fairseq-fixed -r "$requirements" -e "$root"
printf '%s\n' "$wanted" >"$stamp"
