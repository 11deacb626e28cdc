"""Write the index of the recipes, ``configs/README.md`` and its Chinese twin: ``python tools/recipes.py``.

Everything comes from the files under ``configs/``. The head comment of a recipe has one line for every machine that it
is for, with arguments of the command where it needs some::

    # 8x910b: at most 41 of 61 GiB on a device, in training; 380 GiB of a node's host memory.
    # 8x910c checkpoint.async_save=true: at most 37 of 61 GiB ...

and, if it does not just follow the ``base.yaml`` of its folder, ``# After FILE, FILE.`` A base may say how its data
is prepared (a command, indented) and what else the command needs (``# Your data: ARGUMENTS``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.config import RunConfig, load_config

REPO = Path(__file__).resolve().parent.parent
CONFIGS = REPO / "configs"
MACHINE_FILES = "machines"
LANGUAGES = {"README.md": 0, "README_zh.md": 1}


@dataclass(frozen=True)
class Machine:
    """Devices, and the processes of one trainer on all of them. ``about`` is English and Chinese."""

    about: tuple[str, str]
    num_nodes: int
    per_node: int


MACHINES = {
    "cpu": Machine(("CPU", "CPU"), 1, 2),
    "8xgpu": Machine(("8 {}", "8 {}"), 1, 8),
    "16xgpu": Machine(("2 × 8 {}", "2 × 8 {}"), 2, 8),
    "32xgpu": Machine(("4 × 8 {}", "4 × 8 {}"), 4, 8),
    "64xgpu": Machine(("8 × 8 {}", "8 × 8 {}"), 8, 8),
    "8x910b": Machine(("8 Ascend 910B", "8 张昇腾 910B"), 1, 8),
    "16x910b": Machine(("2 × 8 Ascend 910B", "2 × 8 张昇腾 910B"), 2, 8),
    "16x910b_box16": Machine(("16 Ascend 910B, one Box16", "16 张昇腾 910B，一台 Box16"), 1, 16),
    "32x910b": Machine(("4 × 8 Ascend 910B", "4 × 8 张昇腾 910B"), 4, 8),
    "8x910c": Machine(("8 Ascend 910C", "8 张昇腾 910C"), 1, 16),
    "16x910c": Machine(("2 × 8 Ascend 910C", "2 × 8 张昇腾 910C"), 2, 16),
}
_NAMES = "|".join(sorted(MACHINES, key=len, reverse=True))
ROW = re.compile(rf"^# ({_NAMES})( [^:\n]*)?:(?:\n#    )? (.+)$", re.MULTILINE)
FIGURES = re.compile(r"at most (\d+) of (\d+) GiB on a device, .+; (\d+) GiB of a node's host memory\.")
PREPARES = re.compile(r"^#   python (?:.*\\\n)*.*$", re.MULTILINE)
# Folder -> what it is for, in the order of the index.
TASKS = {
    "quickstart": ("Objectives on a CPU: additions", "在 CPU 上试各个目标函数：加法"),
    "quickstart_stages": ("Stages that learn from files, on a CPU: additions", "在 CPU 上试从文件学习的各个阶段：加法"),
    "quickstart_tools": ("A calculator as a tool, on a CPU: products", "在 CPU 上试工具：用计算器算乘积"),
    "quickstart_vision": ("Pictures, on a CPU: counting shapes", "在 CPU 上试图片：数图形"),
    "quickstart_gsm8k": ("GSM8K with random weights, on a CPU", "在 CPU 上用随机权重走通 GSM8K"),
    "grpo_gsm8k": ("GRPO on GSM8K", "GSM8K 上的 GRPO"),
    "grpo_math": ("GRPO on mathematics", "数学上的 GRPO"),
    "grpo_geo3k": ("GRPO on geometry with pictures", "带图几何题上的 GRPO"),
    "dapo_math": ("DAPO on mathematics", "数学上的 DAPO"),
    "dapo_retool": ("DAPO on mathematics with a code interpreter", "数学上使用代码解释器的 DAPO"),
    "gspo_math": ("GSPO on mathematics", "数学上的 GSPO"),
    "aqn": ("Noise on the rollout policy (AQN)", "采样策略上的噪声（AQN）"),
    "sft": ("Supervised fine-tuning on conversations", "对话上的监督微调"),
    "sft_retool": ("Supervised fine-tuning on calls of a code interpreter", "代码解释器调用上的监督微调"),
    "sft_vision": ("Supervised fine-tuning on conversations with pictures", "带图对话上的监督微调"),
    "dpo": ("DPO on pairs of answers", "回答对上的 DPO"),
    "rm": ("A reward model from pairs of answers", "由回答对训练奖励模型"),
}
TITLE = ("Recipes", "配方")
LINKS = (
    "[中文](README_zh.md) · [documentation](../docs/README.md)",
    "[English](README.md) · [全部文档](../docs/README_zh.md)",
)
INTRO = (
    """A run has one or more YAML files and `key=value` behind them. Each `--config` changes those before it: sections
are merged, lists are replaced, an empty section changes nothing. `key=value` comes last, and `${other.key}` is resolved
in the whole. What a run used is written beside it, complete, as `config.yaml`; `--dry-run` prints it.

A folder is a task. Its `base.yaml` comes first, then the file of the model, then, on Ascend, one of
[machines/ascend.yaml](machines/ascend.yaml) (stages that learn from files) and
[machines/ascend_sampling.yaml](machines/ascend_sampling.yaml) (stages that sample). A file says only what is special
about it, with the source of its values, and holds one part of what a run must have: without its base it is refused.
`lora_` is with adapters, `published_` repeats another project's values one by one, `pinned_` is with engines that
sample while the trainer trains (its head says how their Ray is started).

Find the task, the model and the machine. The command is in the last column, to be started on every node, with its
`RANK` and the `ADDRESS` of the first one where there are several. GiB are those of `tools/plan.py`: the fullest device,
of what is usable, and a node's host memory. Rows without are sized by arithmetic: lower
`rollout.vllm.gpu_memory_utilization` first where memory is short. A 910C has two devices of 64 GiB. This page is
written by `make reference` from the heads of the files.""",
    """一次运行由一个或多个 YAML 文件以及其后的 `key=value` 描述。每个 `--config` 修改它之前的文件：
节合并，列表替换，空的节不改变任何东西。`key=value` 最后生效，`${other.key}` 在合并后的整体中解析。
运行实际使用的完整配置写在结果旁边的 `config.yaml`；`--dry-run` 会打印它。

一个目录是一项任务。先是其中的 `base.yaml`，然后是模型的文件；在昇腾上最后再加
[machines/ascend.yaml](machines/ascend.yaml)（从文件学习的阶段）或
[machines/ascend_sampling.yaml](machines/ascend_sampling.yaml)（要采样的阶段）。
每个文件只写自己的特别之处及其取值来源，并且只含一次运行必需内容的一部分：缺了基础文件会被拒绝。
`lora_` 表示使用适配器，`published_` 逐项重复其他项目发布的取值，
`pinned_` 表示训练的同时由引擎采样（如何为引擎启动 Ray 见其开头注释）。

依次找到任务、模型和机器；命令在最后一列，在每个节点上启动，
有多个节点时填入各自的 `RANK` 和首节点的 `ADDRESS`。
GiB 由 `tools/plan.py` 给出：最满的设备、设备可用的显存，以及一个节点的主机内存。
没有数字的行按算术估计：显存不足时先降低 `rollout.vllm.gpu_memory_utilization`。
一张 910C 有两个 64 GiB 的设备。本页由 `make reference` 根据各文件的开头注释生成。""",
)
COLUMNS = (
    ["model", "recipe", "machine", "device, GiB", "host, GiB", "command"],
    ["模型", "配方", "机器", "设备，GiB", "主机，GiB", "命令"],
)
OVERVIEW = (["folder", "task", "models"], ["目录", "任务", "模型"])


@dataclass(frozen=True)
class Recipe:
    """One row of the index: a file on a machine."""

    file: str  # under configs/, as all of them
    machine: str
    files: tuple[str, ...]  # in the order of the command
    overrides: tuple[str, ...]
    yours: tuple[str, ...]  # overrides with places of model and data to fill in
    per_node: int
    about: str
    model: str

    @property
    def folder(self) -> str:
        return self.file.split("/")[0]

    @property
    def num_nodes(self) -> int:
        return 1 if self.per_node != MACHINES[self.machine].per_node else MACHINES[self.machine].num_nodes

    @property
    def num_processes(self) -> int:
        return self.num_nodes * self.per_node

    @property
    def figures(self) -> tuple[int, int, int] | None:
        """GiB of the fullest device, GiB of it that are usable, and GiB of a node's host memory."""
        found = FIGURES.search(self.about)
        return None if found is None else (int(found[1]), int(found[2]), int(found[3]))

    def load(self) -> RunConfig:
        return load_config([CONFIGS / file for file in self.files], self.overrides)

    def options(self) -> list[str]:
        """What a tool is given, without places of model and data."""
        return [word for file in self.files for word in ("--config", str(CONFIGS / file))] + list(self.overrides)

    def command(self) -> str:
        nodes = f"--nnodes {self.num_nodes} --node-rank RANK --master-addr ADDRESS " if self.num_nodes > 1 else ""
        files = (f"--config configs/{file}" for file in self.files)
        rest = (shlex.quote(override) for override in (*self.overrides, *self.yours))
        return " ".join([f"torchrun {nodes}--nproc-per-node {self.per_node} tools/train.py", *files, *rest])


def head(file: str) -> str:
    """The comment that a file begins with."""
    text = (CONFIGS / file).read_text(encoding="utf-8")
    return re.match(r"(?:#.*\n)*", text)[0]  # type: ignore[index]  # it matches nothing, too


def shipped() -> list[str]:
    return sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))


def is_recipe(file: str) -> bool:
    return not file.endswith("/base.yaml") and not file.startswith(f"{MACHINE_FILES}/")


def before(file: str) -> list[str]:
    """The files that a recipe changes."""
    base = f"{file.rpartition('/')[0]}/base.yaml"
    after = re.search(r"^# After (.+)\.$", head(file), re.MULTILINE)
    return after[1].split(", ") if after else [base] if (CONFIGS / base).exists() else []


def recipes() -> list[Recipe]:
    """All rows of the index, in its order."""
    return [found for file in sorted(filter(is_recipe, shipped()), key=_place) for found in _of(file)]


def recipe(name: str, machine: str | None = None) -> Recipe:
    """The row of ``grpo_gsm8k/qwen2.5_7b`` for a machine, or its first one."""
    return next(found for found in _of(f"{name}.yaml") if machine in (None, found.machine))


def _place(file: str) -> tuple[int, bool, list[tuple[str, float]]]:
    """By task, then plain recipes before ``lora_`` and ``pinned_``, then by name and size of the model."""
    folder, name = file.removesuffix(".yaml").split("/")
    words = re.findall(r"([^0-9]*)(\d+(?:\.\d+)?)?", name)
    return list(TASKS).index(folder), "_qwen" in name, [(word, float(number or 0)) for word, number in words]


def _of(file: str) -> list[Recipe]:
    files = (*before(file), file)
    config = load_config([CONFIGS / name for name in files])
    data = [line for name in files for line in re.findall(r"^# Your data: (.+)$", head(name), re.MULTILINE)]
    found: list[Recipe] = []
    for machine, arguments, about in ROW.findall(head(file)):
        words = arguments.split()
        per_node = MACHINES[machine].per_node
        if words[:1] == ["--nproc-per-node"]:
            per_node, words = int(words[1]), words[2:]
        yours = [word for word in words if word.startswith("model.path=")]
        overrides = [word for word in words if word not in yours]
        if found:  # its own directory is that of the first machine
            overrides.append(f"trainer.output_dir={config.trainer.output_dir}_{machine}")
        if not yours and config.model.path.startswith("models/"):
            yours.append(f"model.path=path/to/{Path(config.model.path).name}")
        yours += shlex.split(" ".join(data))
        last = [f"{MACHINE_FILES}/{_machine_file(config)}.yaml"] if "910" in machine else []
        found.append(
            Recipe(file, machine, (*files, *last), tuple(overrides), tuple(yours), per_node, about, config.model.path)
        )
    return found


def _machine_file(config: RunConfig) -> str:
    return "ascend_sampling" if config.trainer.stage == "rl" else "ascend"


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def devices(found: Recipe, language: int) -> str:
    about = MACHINES[found.machine].about[language]
    size = re.search(r"^NVIDIA GPUs(?P<both> or Ascend NPUs)?(?: of (?P<size>\d+ Gi?B))?", found.about)
    if size is None:
        return about
    if language:
        kind = "GPU 或 NPU" if size["both"] else "GPU"
        return about.format(f"张 {size['size']} 的 {kind}" if size["size"] else f"张 {kind}")
    kind = "GPUs or NPUs" if size["both"] else "GPUs"
    return about.format(f"{kind} of {size['size']}" if size["size"] else kind)


def model(found: Recipe, language: int) -> str:
    path = Path(found.model)
    return path.name if path.parts[0] == "models" else ("tiny", "微型模型")[language]


def section(folder: str, rows: Sequence[Recipe], language: int) -> list[str]:
    base = f"{folder}/base.yaml"
    text = [f"## {folder}", "", TASKS[folder][language] + (".", "。")[language], ""]
    if (CONFIGS / base).exists():
        text += [(f"All begin with [{base}]({base}).", f"均以 [{base}]({base}) 开始。")[language], ""]
    files = dict.fromkeys(file for found in rows for file in found.files)
    prepares = [command for file in files for command in PREPARES.findall(head(file))]
    if prepares:
        text += ["```bash", *(command.replace("#   ", "") for command in prepares), "```", ""]
    text += [row(COLUMNS[language]), "|" + "---|" * len(COLUMNS[language])]
    for found in rows:
        link = f"[{Path(found.file).stem}]({found.file})"
        device, usable, host = found.figures or ("", "", "")
        sizes = [f"{device} / {usable}" if device else "", str(host)]
        text.append(row([model(found, language), link, devices(found, language), *sizes, f"`{found.command()}`"]))
    return [*text, ""]


def pages() -> dict[str, str]:
    """File under ``configs/`` -> its text."""
    every = recipes()
    tasks = {folder: [found for found in every if found.folder == folder] for folder in TASKS}
    texts: dict[str, str] = {}
    for name, language in LANGUAGES.items():
        text = [f"# {TITLE[language]}", "", LINKS[language], "", INTRO[language], ""]
        text += [row(OVERVIEW[language]), "|" + "---|" * len(OVERVIEW[language])]
        for folder, rows in tasks.items():
            models = ", ".join(dict.fromkeys(model(found, language) for found in rows))
            text.append(row([f"[{folder}](#{folder})", TASKS[folder][language], models]))
        text.append("")
        for folder, rows in tasks.items():
            text += section(folder, rows, language)
        texts[name] = "\n".join(text).rstrip("\n") + "\n"
    return texts


def main() -> None:
    for name, text in pages().items():
        (CONFIGS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
