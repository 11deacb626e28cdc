#!/usr/bin/env bash
# From nothing to a model trained with GRPO: tiny model, additions, supervised warm-up, reinforcement learning.
#
#   VENV=.venv QUICKSTART_DIR=runs/quickstart tools/quickstart.sh       (what `make quickstart` does)
#
# Starts over each time: QUICKSTART_DIR is removed first, but only where this script made it (it leaves a marker there).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dir=${QUICKSTART_DIR:-runs/quickstart}
python=${VENV:-$PWD/.venv}/bin/python
marker="$dir/.made_by_quickstart"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1

if [ ! -x "$python" ]; then
    echo "quickstart: no environment at ${VENV:-.venv}: run 'make quickstart', which builds it" >&2
    exit 1
fi
if [ -e "$dir" ]; then
    if [ -f "$marker" ]; then
        echo "[quickstart] starting over: removing $dir of an earlier quickstart"
        rm -rf -- "$dir"
    elif [ -n "$(ls -A "$dir")" ]; then
        echo "quickstart: $dir holds something else: move it away, or set QUICKSTART_DIR to another directory" >&2
        exit 1
    fi
fi
mkdir -p "$dir"
touch "$marker"

summary=()
phase() { # phase NAME COMMAND...: run it and note the seconds
    local name=$1 started=$SECONDS
    shift
    echo
    echo "[quickstart] $name"
    "$@"
    summary+=("$(printf '%-28s %5d s' "$name" $((SECONDS - started)))")
}
train() { # train CONFIG [key=value ...] on two ranks, on a port that is free
    local port
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    "$python" -m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 --master-port "$port" \
        tools/train.py --config "$@"
}

phase "tiny model" "$python" tools/make_tiny_model.py --family qwen2 --tokenizer arithmetic --out "$dir/model"
phase "data set" "$python" tools/prepare_data.py arithmetic --out "$dir/data"
phase "supervised warm-up" train configs/quickstart_sft.yaml \
    "model.path=$dir/model" "data.train_files=[$dir/data/sft.jsonl]" "trainer.output_dir=$dir/sft"
phase "GRPO" train configs/quickstart.yaml \
    "model.path=$dir/sft/huggingface" "data.train_files=[$dir/data/train.jsonl]" \
    "data.val_files=[$dir/data/val.jsonl]" "trainer.output_dir=$dir/grpo"

echo
echo "[quickstart] done"
printf '  %s\n' "${summary[@]}"
echo "  checkpoints    $dir/grpo/checkpoints"
echo "  weights        $dir/grpo/huggingface   (a Hugging Face directory)"
echo "  metrics        $dir/grpo/metrics.jsonl"
echo "  dashboard      ${python%/python}/tensorboard --logdir $dir   (then http://localhost:6006/#custom_scalars)"
echo "  report         $python tools/report.py $dir/grpo   (one HTML file)"
