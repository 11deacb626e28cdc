#!/usr/bin/env bash
# What the trainer reaches on one accelerator: parity, speed, memory. See docs/benchmarks.md, "On a GPU".
#
#     WHEELS=DIRECTORY benchmarks/gpu/run.sh [--device cuda|npu|cpu] [--quick] [--out DIRECTORY] [--slices NAME,NAME]
#
# Needs Python with torch 2.11 or newer and transformers; no network, no vLLM, no TransformerEngine. Packages that the
# machine lacks (megatron-core, omegaconf, ...) are taken as wheels from the directory WHEELS, if it is set.
set -euo pipefail
repo=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
path=$repo
if [[ -n ${WHEELS:-} ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl
    path=$site:$repo
fi
PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 "$python" -m benchmarks.gpu.run "$@"
