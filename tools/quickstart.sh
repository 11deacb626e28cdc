#!/usr/bin/env bash
# From nothing to a model trained with GRPO: tiny model, additions, supervised warm-up, reinforcement learning.
#
#   VENV=.venv QUICKSTART_DIR=runs/quickstart tools/quickstart.sh           (what `make quickstart` does)
#   VENV=.venv QUICKSTART_DIR=runs/quickstart_chain tools/quickstart.sh chain     (what `make quickstart-chain` does)
#   VENV=.venv QUICKSTART_DIR=runs/quickstart_tools tools/quickstart.sh tools     (what `make quickstart-tools` does)
#   VENV=.venv QUICKSTART_DIR=runs/quickstart_vision tools/quickstart.sh vision   (what `make quickstart-vision` does)
#
# With "chain" every stage begins where another one ended: SFT -> reward model -> PPO; SFT -> DPO; SFT -> SFT with
# adapters -> merged -> GRPO. With "tools" the model learns to ask a calculator for products; with "vision" a model with
# a vision tower learns to count drawn shapes. QUICKSTART_SEED (0) is that of the weights, of the data and of all runs.
# Starts over each time: QUICKSTART_DIR is removed first, but only where this script made it (it leaves a marker there).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=${1:-grpo}
dir=${QUICKSTART_DIR:-runs/quickstart}
seed=${QUICKSTART_SEED:-0}
python=${VENV:-$PWD/.venv}/bin/python
marker="$dir/.made_by_quickstart"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1

case "$what" in
    grpo | chain | tools | vision) ;;
    *)
        echo "quickstart: '$what' is none of grpo, chain, tools and vision" >&2
        exit 2
        ;;
esac
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
phase() { # phase NAME COMMAND...: run it and note the seconds, and the processor's of everything that it started
    local name=$1 started=$SECONDS before
    shift
    echo
    echo "[quickstart] $name"
    times >"$dir/.times"
    before=$(processor_seconds)
    "$@"
    times >"$dir/.times"
    summary+=("$(printf '%-28s %5d s %5d s of processors' "$name" $((SECONDS - started)) \
        $(($(processor_seconds) - before)))")
}
processor_seconds() { # what `times` has last said of the children that have ended, user and system together
    awk 'NR == 2 { gsub(/[ms]/, " "); print int($1 * 60 + $2 + $3 * 60 + $4) }' "$dir/.times"
}
train() { # train --config FILE ... [key=value ...] on two ranks, on a port that is free
    local port
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    "$python" -m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 --master-port "$port" \
        tools/train.py "$@" "trainer.seed=$seed" "data.seed=$seed"
}
held_out() { # held_out MODEL OUT: the held-out problems, once greedy and $samples times sampled
    "$python" tools/eval.py "$1" "${grpo[@]}" --data "$dir/data/val.jsonl" --samples "$samples" --tensor-parallel 1 --out "$2"
}

stages=configs/quickstart_stages base=(--config configs/quickstart/base.yaml)
task=arithmetic samples=8 family=qwen2 sft=$stages/sft.yaml grpo=("${base[@]}" --config configs/quickstart/grpo.yaml)
if [ "$what" = tools ]; then
    task=products samples=0
elif [ "$what" = vision ]; then
    task=shapes family=qwen2_5_vl
fi
if [ "$what" = tools ] || [ "$what" = vision ]; then
    sft=configs/quickstart_$what/sft.yaml grpo=(--config "configs/quickstart_$what/grpo.yaml")
fi
phase "tiny model" "$python" tools/make_tiny_model.py --family "$family" --tokenizer "$task" --seed "$seed" \
    --out "$dir/model"
phase "data set" "$python" tools/prepare_data.py "$task" --seed "$seed" --out "$dir/data"
phase "supervised warm-up" train --config "$sft" \
    "model.path=$dir/model" "data.train_files=[$dir/data/sft.jsonl]" "trainer.output_dir=$dir/sft"
prompts=("data.train_files=[$dir/data/train.jsonl]" "data.val_files=[$dir/data/val.jsonl]")
pairs=("data.train_files=[$dir/data/pairs.jsonl]" "data.val_files=[$dir/data/pairs_val.jsonl]")

if [ "$what" = chain ]; then
    phase "reward model" train --config $stages/rm.yaml "model.path=$dir/sft/huggingface" "${pairs[@]}" \
        "trainer.output_dir=$dir/rm"
    phase "PPO with it" train "${base[@]}" --config configs/quickstart/ppo.yaml "model.path=$dir/sft/huggingface" "${prompts[@]}" \
        "critic.path=$dir/rm/huggingface" "trainer.output_dir=$dir/ppo" algorithm.kl_coefficient=0.2 \
        "rewards=[{name: model, options: {path: $dir/rm}}, {name: exact_match, weight: 0.0}]"
    phase "DPO" train --config $stages/dpo.yaml "model.path=$dir/sft/huggingface" "${pairs[@]}" \
        "trainer.output_dir=$dir/dpo"
    phase "SFT with adapters" train --config $stages/lora_sft.yaml "model.path=$dir/sft/huggingface" "${prompts[@]}" \
        "trainer.output_dir=$dir/lora_sft"
    phase "merge" "$python" tools/merge_lora.py "$dir/sft/huggingface" "$dir/lora_sft/adapter" -o "$dir/merged" --verify
    phase "GRPO of the merged model" train "${grpo[@]}" "model.path=$dir/merged" "${prompts[@]}" \
        "trainer.output_dir=$dir/grpo"
    for stage in sft ppo dpo; do # what GRPO begins and ends with, its own validation says
        phase "held-out sums: $stage" held_out "$dir/$stage/huggingface" "$dir/eval/$stage"
    done
else
    phase "GRPO" train "${grpo[@]}" "model.path=$dir/sft/huggingface" "${prompts[@]}" \
        "trainer.output_dir=$dir/grpo"
fi
if [ "$what" = tools ]; then # an evaluation answers in one turn: no calculator answers it
    phase "held-out products, no tool" held_out "$dir/grpo/huggingface" "$dir/eval"
fi

echo
echo "[quickstart] done"
printf '  %s\n' "${summary[@]}"
echo "  checkpoints    $dir/grpo/checkpoints"
echo "  weights        $dir/grpo/huggingface   (a Hugging Face directory)"
echo "  metrics        $dir/grpo/metrics.jsonl"
echo "  dashboard      ${python%/python}/tensorboard --logdir $dir   (then http://localhost:6006/#custom_scalars)"
echo "  report         $python tools/report.py $dir/grpo   (one HTML file)"
