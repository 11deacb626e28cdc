#!/usr/bin/env bash
# Build the Python environment from requirements/*.lock; no work where it is already there.
#
#   tools/bootstrap.sh DIRECTORY [--dependencies-only]
#   tools/bootstrap.sh DIRECTORY --npu-emulation
#
# The environment is complete when DIRECTORY/.mega_rl_complete holds the hash of the lock files, the Python version and
# the clone where mega_rl is installed; that marker is written last, so an interrupted build is rebuilt.
# With --dependencies-only mega_rl itself is left out, so that several clones can share the directory (they find the
# package through PYTHONPATH).
# With --npu-emulation, after one of the above, the torch_npu wheel of the emulated tests is installed too, in
# DIRECTORY/npu_emulation/wheel: off the path of the environment, so that nothing else imports it. Beside it, in wheels,
# lie the releases whose operator schemas our calls are held against; they are only read. In DIRECTORY/npu_emulation/rollout
# lie vLLM and vLLM-Ascend; if the index lacks a wheel of them, its name stands in npu_emulation/rollout_missing.txt.
# PYTHON chooses the interpreter (3.11 or 3.12; default: python3.11, then python3.12, then python3).
# Where packages come from is pip's own configuration (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf).
set -euo pipefail

say() { printf '[bootstrap] %s\n' "$*"; }
die() { printf '[bootstrap] error: %s\n' "$*" >&2; exit 1; }

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:?usage: tools/bootstrap.sh DIRECTORY [--dependencies-only | --npu-emulation]}
with_package=1
case "${2:-}" in
"" | --npu-emulation) ;;
--dependencies-only) with_package=0 ;;
*) die "unknown argument $2" ;;
esac

fits() { command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }

choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11 or 3.12: set PYTHON to one that is"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3; do
        if fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or 3.12 found: install one, or set PYTHON to its path"
}

has_library() { "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null; }

system_packages() {
    local missing=()
    [ "$(uname -s)" = Linux ] || die "this system is $(uname -s): the sampler (vLLM for CPU) is installed on Linux only"
    has_library libnuma.so.1 || missing+=(libnuma1) # vLLM's CPU kernels link it
    command -v gcc >/dev/null || missing+=(gcc)
    command -v g++ >/dev/null || missing+=(g++)
    command -v readelf >/dev/null && command -v nm >/dev/null || missing+=(binutils)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        missing+=("python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv")
    [ ${#missing[@]} -eq 0 ] && return
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        say "installing system packages: ${missing[*]}"
        DEBIAN_FRONTEND=noninteractive apt-get update -qq </dev/null
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null
    else
        die "system packages are missing: install them (on Debian and Ubuntu: sudo apt-get install ${missing[*]}) and run this again"
    fi
}

python=$(choose_python)
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
want=$({ echo "$version package=$with_package repo=$([ $with_package = 1 ] && echo "$repo")"
         cat "$repo"/requirements/*.lock; } | sha256sum | cut -c1-16)
marker="$venv/.mega_rl_complete"

complete() { [ -f "$marker" ] && [ "$(cat "$marker")" = "$want" ] && [ -x "$venv/bin/python" ]; }

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" </dev/null; }

# One builder at a time; the others wait and find it complete.
lock() {
    exec 9>"$1"
    ! command -v flock >/dev/null || flock 9
}

npu_emulation() {
    local home="$venv/npu_emulation" pin="$repo/requirements/npu_emulation.txt" read="$repo/requirements/npu_schemas.txt"
    local wheel
    [ -f "$marker" ] || die "$venv is not complete: run tools/bootstrap.sh $venv first"
    mkdir -p "$home"
    lock "$home/wheel.lock"
    if cat "$pin" "$read" | cmp -s - "$home/installed.txt"; then
        return
    fi
    say "torch_npu for the emulated tests"
    rm -rf "$home/wheel" "$home/wheels" "$home/installed.txt"
    pip install -q --no-deps --target "$home/wheel" -r "$pin"
    grep -v '^#' "$read" | while read -r wheel; do # one at a time: they are versions of one package
        pip download -q --no-deps --only-binary=:all: -d "$home/wheels" "$wheel"
    done
    cat "$pin" "$read" >"$home/installed.txt"
}

npu_rollout() {
    local home="$venv/npu_emulation" pin="$repo/requirements/npu_rollout.txt"
    lock "$home/wheel.lock"
    if cmp -s "$pin" "$home/rollout_installed.txt"; then
        return
    fi
    say "vLLM-Ascend for the emulated tests"
    rm -rf "$home/rollout" "$home/rollout_missing.txt" "$home/rollout_installed.txt"
    if ! pip install -q --no-deps --no-compile --require-hashes --only-binary=:all: --target "$home/rollout" -r "$pin" \
        2>"$home/rollout.log"; then
        rm -rf "$home/rollout"
        sed -n 's/.*No matching distribution found for \([^ ]*\).*/\1/p' "$home/rollout.log" | sort -u >"$home/rollout_missing.txt"
        if [ ! -s "$home/rollout_missing.txt" ]; then
            tail -n 20 "$home/rollout.log" >&2
            die "vLLM-Ascend could not be installed in $home/rollout; the lines above say why"
        fi
        say "the tests with vLLM-Ascend are skipped: the index has no $(tr '\n' ' ' <"$home/rollout_missing.txt")"
        return
    fi
    rm -f "$home"/rollout/vllm/*.so # kernels for a CPU, of another torch; none is called on device npu
    # what about twenty processes of the tests import, some seconds each if it is not compiled
    "$venv/bin/python" -m compileall -q "$home/rollout/vllm" "$home/rollout/vllm_ascend" || true
    cp "$pin" "$home/rollout_installed.txt"
}

system_packages
if [ "${2:-}" = "--npu-emulation" ]; then
    npu_emulation
    npu_rollout
    exit 0
fi
if complete; then
    exit 0
fi
mkdir -p "$(dirname "$venv")"
lock "$venv.lock"
if complete; then
    exit 0
fi
if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    die "$venv exists and is not a Python environment: move it away, or choose another directory"
fi

started=$SECONDS
say "building $venv with $("$python" --version)"
rm -f "$marker"
"$python" -m venv --clear "$venv"
say "torch"
exactly() { pip install -q --no-deps --require-hashes "$@"; }
if ! exactly -r "$repo/requirements/torch.lock"; then
    say "the index has no such build of torch for CPUs (the lines above): taking its own, which is large"
    exactly -r "$repo/requirements/torch_cuda.lock"
fi
say "everything else, exact versions and hashes"
exactly -r "$repo/requirements/cpu.lock" -r "$repo/requirements/dev.lock"
if [ $with_package = 1 ]; then
    pip install -q --no-deps --no-build-isolation -e "$repo"
fi
# The index's torchvision is built for CUDA; every program of the environment can import it beside this torch.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$repo/requirements/torchvision_schemas.py" "$packages/torchvision_schemas.py"
echo "import torchvision_schemas" >"$packages/torchvision_schemas.pth"
"$venv/bin/python" -c 'import torch, torchvision, vllm' >/dev/null 2>"$venv/import.log" ||
    { tail -n 5 "$venv/import.log" >&2; die "the new environment cannot import torch and vllm; the lines above say why"; }
echo "$want" >"$marker"
say "done in $((SECONDS - started)) s"
