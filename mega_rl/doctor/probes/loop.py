"""Three steps of GRPO with a tiny model, as a user starts them: ``tools/train.py`` on one or two devices.

Trainer, bridge and engine share the devices, the engine sleeps where it can, and every sync is proved.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from mega_rl import platform
from mega_rl.data.rows.rows import write_jsonl
from mega_rl.doctor.probes import report
from mega_rl.synthetic.arithmetic import ArithmeticSpec, arithmetic_data, arithmetic_tokenizer
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model

TRAIN = Path(__file__).resolve().parents[3] / "tools" / "train.py"
NUM_STEPS, MAX_RANKS, TEMPERATURE = 3, 2, 0.8
CACHE_BYTES = 1 << 26
REWARD = '''
def digits(data_source, solution_str, ground_truth, extra_info):
    """The share of digits: random weights write some, so that answers differ and there is something to learn."""
    return sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1)
'''
FIGURES = {  # metric -> the name that it is reported under; the largest of all steps counts
    "gate/reference": "reference",
    "gate/ppo_kl": "ppo_kl",
    "gate/ratio": "ratio",
    "rollout/logprob_diff_mean": "engine",
}


def configuration(directory: Path, name: str, num_ranks: int) -> dict[str, Any]:
    """The run of this platform; everything that it reads is written into the directory."""
    on_cpu = name == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
    model = write_tiny_model(directory / "model", TinyModelSpec(hidden_size=256, dtype=dtype), arithmetic_tokenizer())
    rows = arithmetic_data(ArithmeticSpec(max_operand=9, num_train=40, num_val=1, num_sft=1)).train
    write_jsonl(directory / "train.jsonl", rows)
    (directory / "reward.py").write_text(REWARD)
    vllm = {"enforce_eager": True, "max_num_seqs": 16, "kv_cache_memory_bytes": CACHE_BYTES}
    engine = {"kv_cache_bytes": CACHE_BYTES} if on_cpu else {"vllm": vllm}
    return {
        "model": {"path": str(model), "dtype": dtype},
        "data": {
            "train_files": [str(directory / "train.jsonl")],
            "train_batch_size": 4,
            "max_prompt_length": 8,
            "max_response_length": 8,
        },
        "rollout": {
            "tensor_parallel_size": num_ranks,
            "n": 4,
            "temperature": TEMPERATURE,
            "ignore_eos": True,
            **engine,
        },
        "bridge": {"verify": "all"},
        "rewards": [{"name": f"{directory / 'reward.py'}:digits"}],
        "optimizer": {"lr": 1e-5},
        "parallel": {"tensor": num_ranks, "sequence": num_ranks > 1},
        "trainer": {"total_steps": NUM_STEPS, "output_dir": str(directory / "run")},
        "checkpoint": {"save_freq": -1, "export_hf": False},
        "validation": {"test_freq": -1},
        "platform": {"name": name},
    }


def main() -> None:
    environ = {"OMP_NUM_THREADS": "1", **os.environ}  # choosing the platform sets what the run is to set for itself
    here = platform.current()
    num_devices = MAX_RANKS if here.name == "cpu" else torch.get_device_module(here.name).device_count()
    num_ranks = min(num_devices, MAX_RANKS)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        directory = Path(folder)
        (directory / "loop.yaml").write_text(json.dumps(configuration(directory, here.name, num_ranks)))
        report(num_ranks=num_ranks, num_steps=NUM_STEPS)
        free.bind(("127.0.0.1", 0))
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--master-addr", "127.0.0.1"]
        launcher += ["--master-port", str(free.getsockname()[1])]
        free.close()
        command = [sys.executable, *launcher, str(TRAIN), "--config", str(directory / "loop.yaml")]
        status = subprocess.run(command, env=environ).returncode
        if status == 0:
            lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
            summarise([json.loads(line)["metrics"] for line in lines])
    sys.exit(status)


def summarise(steps: list[dict[str, float]]) -> None:
    """Report the largest of each agreement, what was proved, and whether the weights moved."""
    for metric, name in FIGURES.items():
        report(**{name: max(step[metric] for step in steps if metric in step)})
    trained = [step for step in steps if "actor/grad_norm" in step]
    report(verified=min(step["bridge/verified_tensors"] for step in trained if "bridge/verified_tensors" in step))
    report(steps=len(trained), grad_norm=max(step["actor/grad_norm"] for step in trained))


if __name__ == "__main__":
    main()
