"""Whether what is made from every configuration file of a neighbour starts: ``tools/train.py --dry-run`` of each.

    python -m benchmarks.importing.starts --from verl CHECKOUT/examples [--devices 8] [--list] [--json PATH]

What a file names outside of itself is put in its place: a small model of the same kind (dense, with experts or with a
tower), files of data, a reward function, and a reward where the file names none, which is counted apart. The number of
processes is the one that the file says, or ``--devices``. Everything runs in this process. ``--list`` names the files
that do not start, each with why.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import yaml

from benchmarks.importing.published import files, is_another, read
from benchmarks.report import publish, table
from mega_rl.config.reading.tables import NEIGHBOURS
from mega_rl.errors import InputError
from mega_rl.importers.convert import as_tree
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.draft.units import SEES
from tools import train

# Sizes that all published layouts divide; only config.json is read.
SIZES: dict[str, Any] = {
    "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 64, "num_hidden_layers": 192,
    "intermediate_size": 4096, "vocab_size": 262144, "max_position_embeddings": 1 << 21, "hidden_act": "silu",
}  # fmt: skip
EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "norm_topk_prob": True,
           "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 64}  # fmt: skip
TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 4096}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["Qwen2ForCausalLM"], **SIZES},
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], **SIZES, **EXPERTS},
    "seeing": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **SIZES,
        "vision_config": TOWER,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    },
    "values": {"architectures": ["Qwen2ForSequenceClassification"], **SIZES, "num_labels": 1},
}
REWARD = "def {name}(*arguments, **options):\n    return 0.0\n"


def kind_of(result: dict[str, Any]) -> str:
    """Which of the small models stands for the one that the configuration names."""
    needs_experts = any(key.startswith("router.") and value for key, value in result.items())
    needs_experts |= result.get("parallel.expert", 1) > 1 or result.get("rollout.routing_replay", "off") != "off"
    if needs_experts:
        return "experts"
    return "seeing" if SEES.search(str(result.get("model.path", ""))) else "dense"


def put_in_place(draft: Draft, folder: Path) -> tuple[dict[str, Any], bool]:
    """The configuration with models, data and rewards under ``folder``, and whether a reward was added."""
    result = dict(draft.result)
    result["model.path"] = _model(folder, kind_of(result))
    for key in ("critic.path", "tuning.adapter.path"):
        if result.get(key):
            result[key] = _model(folder, "values") if key == "critic.path" else _adapter(folder, result)
    asked = {ours for key in draft.given.unresolved if (entry := draft.table.find(key)) for ours in entry.to}
    for key in ("data.train_files", "data.val_files"):
        if result.get(key) or key == "data.train_files" or key in asked:
            result[key] = [_file(folder / f"{key}.jsonl")]
    result["trainer.output_dir"] = str(folder / "run")
    if result.get("checkpoint.resume") not in (None, "auto", "never"):
        result["checkpoint.resume"] = "auto"
    if result["trainer.stage"] != "rl":
        return result, False
    result["rewards"] = [_reward(dict(reward), folder) for reward in draft.rewards] or [{"name": "exact_match"}]
    return result, not draft.rewards


def _model(folder: Path, kind: str) -> str:
    target = folder / kind
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(MODELS[kind]))
    for name in ("tokenizer.json", "model.safetensors"):
        _file(target / name)
    return str(target)


def _adapter(folder: Path, result: dict[str, Any]) -> str:
    """As PEFT writes it, with the rank, scale and layers of the configuration."""
    target = folder / "adapter"
    target.mkdir(exist_ok=True)
    adapter = {
        "peft_type": "LORA",
        "r": result["tuning.adapter.rank"],
        "lora_alpha": result["tuning.adapter.alpha"],
        "target_modules": "all-linear",
    }
    (target / "adapter_config.json").write_text(json.dumps(adapter))
    _file(target / "adapter_model.safetensors")
    return str(target)


def _file(path: Path) -> str:
    path.write_text("")
    return str(path)


def _reward(reward: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One of a file or package of their own becomes a function of the same name."""
    if reward["name"] == "model":
        return reward | {"options": {"path": _model(folder, "values")}}
    if ":" not in reward["name"]:
        return reward
    function = reward["name"].rpartition(":")[2]
    file = folder / f"{function}.py"
    file.write_text(REWARD.format(name=function))
    return reward | {"name": f"{file}:{function}"}


def processes(draft: Draft, devices: int) -> int:
    """What the file says; else ``devices``, or the fewest processes of its layout."""
    tensor, pipeline, context, expert = (
        draft.result.get(f"parallel.{axis}") or 1 for axis in ("tensor", "pipeline", "context", "expert")
    )
    parts = (draft.result.get("parallel.expert_tensor") or tensor) * expert if expert > 1 else 1
    least = pipeline * math.lcm(tensor * context, parts)
    entries = [draft.table.find(key) for key in draft.given.values]
    if draft.num_devices and any(entry is not None and entry.reason == "launch" for entry in entries):
        return draft.num_devices
    return -(-(draft.num_devices or devices) // least) * least


def start(draft: Draft, folder: Path, devices: int) -> tuple[str | None, bool]:
    """Why a dry run of the draft fails, or None; and whether a reward had to be added."""
    result, is_rewarded = put_in_place(draft, folder)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(as_tree(result)), encoding="utf-8")
    os.environ["WORLD_SIZE"] = str(processes(draft, devices))
    try:
        with redirect_stdout(io.StringIO()):
            train.main(["--config", str(file), "--dry-run"])
    except InputError as error:
        return str(error), is_rewarded
    finally:
        del os.environ["WORLD_SIZE"]
    return None, is_rewarded


def measure(neighbour: str, paths: list[Path], devices: int) -> dict[str, Any]:
    """Counts of files that start, and why others do not."""
    counts: Counter[str] = Counter(dict.fromkeys(["files", "read", "start", "without a reward"], 0))
    failed: dict[str, str] = {}
    for path in paths:
        draft = read(neighbour, path, devices)
        if is_another(draft):
            continue
        counts["files"] += 1
        if isinstance(draft, str):
            failed[str(path)] = draft
            continue
        counts["read"] += 1
        with tempfile.TemporaryDirectory() as folder:
            why, is_rewarded = start(draft, Path(folder), devices)
        counts["without a reward"] += is_rewarded
        counts["start"] += why is None
        if why is not None:
            failed[str(path)] = why.replace(folder, "")
    return {"from": neighbour, **counts, "share": counts["start"] / max(1, counts["files"]), "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="neighbour", required=True, choices=NEIGHBOURS)
    parser.add_argument("places", nargs="+", type=Path, metavar="FOLDER_OR_FILE")
    parser.add_argument("--devices", type=int, default=8, help="of a run whose file does not say it; default 8")
    parser.add_argument("--list", action="store_true", help="name the files that do not start, and why")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    found = measure(options.neighbour, files(options.neighbour, options.places), options.devices)
    header = [name for name in found if name != "failed"]
    text = table(header, [[found[name] for name in header]])
    if options.list:
        text += "\n" + "\n".join(f"\n{path}: {why}" for path, why in found["failed"].items())
    publish(f"Starts of imported files of {NEIGHBOURS[options.neighbour]}", text, "cpu", found, options.json)


if __name__ == "__main__":
    main()
