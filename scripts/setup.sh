#!/usr/bin/env bash
# Make the virtual environment of this repository, with everything at the versions of requirements.txt.
#
#     scripts/setup.sh                   a second call finds everything done and returns at once
#
# ATTN_REG_VENV         where (default: .venv in the repository)
# PYTHON                interpreter to make it with, 3.11 or 3.12 (default: whichever is found)
# ATTN_REG_MIN_DISK_GB  free space to ask for before installing (default: 4)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${ATTN_REG_VENV:-$root/.venv}
requirements=$root/scripts/requirements.txt
minimum_gb=${ATTN_REG_MIN_DISK_GB:-4}
stamp=$venv/.setup-stamp
log=$venv/setup.log

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

version_of() { # the version of an interpreter as 3.12; nothing when it cannot be run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null || true
}

fits() { [[ $1 == 3.11 || $1 == 3.12 ]]; }

choose_python() { # sets python
    local candidate version
    if [[ -n ${PYTHON:-} ]]; then
        version=$(version_of "$PYTHON")
        fits "$version" || die "PYTHON is $PYTHON, which is ${version:-no Python that runs}; Python 3.11 or 3.12 is needed."
        python=$PYTHON
        return
    fi
    for candidate in "$venv/bin/python" python3.12 python3.11 python3; do
        if fits "$(version_of "$candidate")"; then
            python=$candidate
            return
        fi
    done
    version=$(version_of python3)
    die "Python 3.11 or 3.12 is needed, and the python3 found here is ${version:-absent}; install one or name it in PYTHON."
}

fingerprint() { # of all that decides what is installed
    "$python" - "$root" "$requirements" "$root/setup.py" <<'PY'
import hashlib, pathlib, sys
parts = [sys.version, sys.argv[1], *(pathlib.Path(path).read_text(encoding="utf-8") for path in sys.argv[2:])]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
}

check_disk() {
    local folder=$venv available_kb
    while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
    available_kb=$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')
    [[ $minimum_gb =~ ^[0-9]+$ ]] || die "ATTN_REG_MIN_DISK_GB is $minimum_gb; a whole number of GB is needed."
    ((available_kb >= minimum_gb * 1024 * 1024)) ||
        die "only $((available_kb / 1024 / 1024)) GB are free where $venv goes; $minimum_gb GB are needed."
}

make_venv() {
    local clear=()
    if [[ -f $venv/pyvenv.cfg ]]; then
        [[ $(version_of "$venv/bin/python") == $(version_of "$python") ]] &&
            "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
        say "$venv is of another Python or damaged: making it anew"
        clear=(--clear)
    elif [[ -d $venv && -n $(ls -A "$venv") && ! -d $venv/bin ]]; then
        die "$venv is there but is no virtual environment; name another folder in ATTN_REG_VENV."
    fi
    say "making $venv with Python $(version_of "$python")"
    local output
    output=$("$python" -m venv ${clear[@]+"${clear[@]}"} "$venv" 2>&1) ||
        die "$python could not make a virtual environment ($(tail -n 1 <<<"$output")); on Debian and Ubuntu the package python3-venv does it."
}

forget_unfinished() { # pip takes a package whose installation was killed for installed; it writes RECORD and INSTALLER last
    local info
    for info in "$venv"/lib/python3.*/site-packages/*.dist-info; do
        [[ -d $info ]] || continue
        [[ -f $info/RECORD && -f $info/INSTALLER ]] || rm -rf "$info"
    done
}

explain() { # one sentence on why pip failed, from its log
    if grep -qiE 'No space left on device' "$log"; then
        die "the disk is full; free some space and run this again (pip's log: $log)."
    elif grep -qiE 'NewConnectionError|ConnectTimeout|ReadTimeout|Max retries exceeded|Temporary failure in name|ProxyError|SSLError|CERTIFICATE_VERIFY' "$log"; then
        die "pip could not reach its package index; check the network, or the index in \`pip config list\` (pip's log: $log)."
    elif grep -qiE "command '?[^ ]*(gcc|g\+\+|cc|c\+\+|clang)[^ ]*'? failed: No such file|unable to execute|Python\.h: No such file" "$log"; then
        die "$(compiler_advice) (pip's log: $log)."
    elif grep -qiE 'No matching distribution found|Could not find a version' "$log"; then
        die "pip's index does not have $(sed -nE 's/.*No matching distribution found for ([^ ]+).*/\1/p' "$log" | tail -n 1) for this Python, or pip could not reach it; see \`pip config list\` (pip's log: $log)."
    fi
    die "pip failed: $(grep -E '^ *(ERROR|error)' "$log" | tail -n 1) (pip's log: $log)."
}

compiler_advice() {
    echo "fairseq is built from source on Python $(version_of "$python"), which needs a C++ compiler and the headers of Python (packages g++ and python3-dev); or use Python 3.12, for which nothing is built"
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 </dev/null; }

install() { pip install --constraint "$requirements" "$@" || explain; }

pinned() { # NAME==VERSION of a package in the requirements
    grep -iE "^$1==" "$requirements" || die "$requirements does not pin $1."
}

check_compiler() { # before the long download rather than after it
    local headers
    headers=$("$venv/bin/python" -c 'import os, sysconfig; print(os.path.join(sysconfig.get_path("include"), "Python.h"))')
    if { command -v c++ || command -v g++ || command -v clang++; } >/dev/null && [[ -f $headers ]]; then return; fi
    "$venv/bin/python" -m pip show --quiet fairseq-fixed >/dev/null 2>&1 && return
    pip download --quiet --no-deps --only-binary :all: --dest "$venv/.wheel" "$(pinned fairseq-fixed)" ||
        die "$(compiler_advice)."
    rm -rf "$venv/.wheel"
}

drop_unusable_torchaudio() { # fairseq asks for it, for speech; transformers imports it, and fails if it is for another torch
    "$venv/bin/python" -c 'import torchaudio' >>"$log" 2>&1 </dev/null || pip uninstall --yes torchaudio || true
}

install_all() {
    : >"$log"
    forget_unfinished
    check_compiler
    say "1/4 torch and the build tools (the long download)"
    install "$(pinned torch)" "$(pinned numpy)" "$(pinned cython)" "$(pinned setuptools)" "$(pinned wheel)"
    say "2/4 fairseq (a wheel on Python 3.12; some minutes of compiling on 3.11)"
    install --no-build-isolation "$(pinned fairseq-fixed)"
    say "3/4 the other packages"
    install --use-pep517 --requirement "$requirements" # seqeval has no wheel and names what builds it in setup.py only
    drop_unusable_torchaudio
    say "4/4 attn_reg_plugin itself"
    pip install --no-build-isolation --no-deps --editable "$root" || explain
}

choose_python
wanted=$(fingerprint)
if [[ -x $venv/bin/python && -f $stamp && $(cat "$stamp") == "$wanted" ]]; then exit 0; fi
check_disk
make_venv
rm -f "$stamp"
install_all
printf '%s\n' "$wanted" >"$stamp"
say "done"
