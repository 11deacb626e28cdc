"""The command line of ``tools/train.py``: what it refuses before anything heavy starts."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from mega_rl import platform
from mega_rl.config import load_config
from mega_rl.errors import InputError
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model
from tests.launching.launch import REPO, Launched, alive, run, run_copy, started, torchrun_command
from tools import train

CONFIG = """
model: {{path: {model}}}
data: {{train_files: [{data}], max_prompt_length: 8, max_response_length: 8}}
rewards: [{{name: exact_match}}]
trainer: {{output_dir: {output_dir}, total_steps: 1}}
platform: {{name: cpu}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    spec = TinyModelSpec(hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=1, ffn=8)
    model = write_tiny_model(tmp_path / "model", spec, arithmetic_tokenizer())
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(model=model, data=data, output_dir=tmp_path / "run"))
    return file


@pytest.fixture(autouse=True)
def world_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


def refusal(config: Path, *overrides: str) -> str:
    """What ``main`` says; the run has left nothing behind."""
    with pytest.raises(InputError) as caught:
        train.main(["--config", str(config), *overrides])
    assert not (config.parent / "run").exists()
    return str(caught.value)


def change_model(config: Path, **values: object) -> None:
    file = config.parent / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "model.path=nowhere/model",
            ("model.path is 'nowhere/model'", "does not exist", "Hugging Face model directory"),
        ),
        ("parallel.tensor=2", ("parallel.tensor is 2", "num_key_value_heads", "divisor of 1")),
        ("parallel.pipeline=3", ("= 3 does not divide the world size 2", "start a multiple of 3")),
        ("rollout.tensor_parallel_size=4", ("rollout.tensor_parallel_size is 4", "world size 2", "one of 1, 2")),
        ("optimizer.warmup=1", ("unknown key optimizer.warmup", "did you mean optimizer.warmup_steps?")),
        ("rollot.n=4", ("unknown key rollot", "did you mean rollout?")),
        ("optimizer.lr=fast", ("optimizer.lr", "'fast'")),
        ("data.train_files=[gone.jsonl]", ("data.train_files", "'gone.jsonl'", "does not exist")),
        ("checkpoint.resume=runs/gone", ("checkpoint.resume is 'runs/gone'", "checkpoint directory")),
        ("platform.name=abacus", ("platform.name is 'abacus'", "cpu")),
    ],
)
def test_a_bad_value(config: Path, override: str, parts: tuple[str, ...]) -> None:
    sentence = refusal(config, override)
    assert [part for part in parts if part not in sentence] == [], sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rollout.vllm.zzz=1", ("rollout.vllm.zzz is not an argument of the installed vLLM",)),
        ("rollout.vllm.model=x", ("rollout.vllm.model is set by mega_rl itself: set model.path instead",)),
        ("rollout.vllm.max_model_len=-5", ("rollout.vllm.max_model_len is set by mega_rl itself",)),
        ("rollout.vllm.worker_extension_cls=x", ("rollout.vllm.worker_extension_cls is set by mega_rl itself",)),
        ("rollout.vllm.gpu_memory_utilization=7", ("rollout.vllm.gpu_memory_utilization is 7", "<= 1")),
        ("rollout.vllm.trust_remote_code=true", ("rollout.vllm.trust_remote_code is True", "remove it")),
        ("rollout.vllm.max_num_seqs=-1", ("rollout.vllm.max_num_seqs is -1: give a whole number >= 1",)),
        ("rollout.vllm.block_size=abc", ("rollout.vllm.block_size is 'abc': give a whole number >= 1",)),
        ("rollout.vllm.hf_overrides={vocab_size: 3}", ("rollout.vllm.hf_overrides is set by mega_rl itself",)),
        ("trainer.output_dir=/", ("trainer.output_dir is '/', which is the root of the file system",)),
        ("rollout.temperature=1e-30", ("rollout.temperature is 1e-30: set it to a number >= 0.01",)),
        ("optimizer.weight_decay=1e30", ("optimizer.weight_decay is 1e+30: set it to a number >= 0 and <= 100",)),
        ("optimizer.eps=1e30", ("optimizer.eps is 1e+30: set it to a number > 0 and <= 1",)),
        ("algorithm.kl_coefficient=1e30", ("algorithm.kl_coefficient is 1e+30",)),
        ("rollout.num_engines=100000", ("rollout.num_engines is 100000",)),
        ("trainer.collective_timeout_s=1e-9", ("trainer.collective_timeout_s is 1e-09: set it to a number >= 1",)),
        ("reward_workers.timeout_s=1e-9", ("reward_workers.timeout_s is 1e-09",)),
        ("rollout.vllm.load_format=pt", ("rollout.vllm.load_format is 'pt'", "safetensors")),
        ("rollout.vllm.kv_cache_dtype=int3", ("rollout.vllm.kv_cache_dtype is 'int3': give 'auto' or ",)),
        ("rollout.vllm.num_gpu_blocks_override=-3", ("num_gpu_blocks_override is -3: give a whole number >= 1",)),
        ("rewards=[{name: code_tests, options: {timeout_s: .nan}}]", ("timeout_s of code_tests is nan",)),
        ("rewards=[{name: overlong, options: {max_length: 9, buffer: 2, factor: .inf}}]", ("factor of overlong",)),
        ("aqn={enabled: true, exclude_patterns: [zzz]}", ("aqn.exclude_patterns has 'zzz', which matches no norm",)),
        ("rewards=[{name: nope}]", ("rewards: 'nope' is not a built-in reward", "package.module:function")),
        (
            "algorithm.objective=os:system",
            ("algorithm.objective: os:system takes command", "name parameters of logprobs_T"),
        ),
        ("algorithm.objective=gone.py:f", ("algorithm.objective is 'gone.py:f', but gone.py is not a file",)),
        ("algorithm.advantage=x:y", ("algorithm.advantage: 'x:y' cannot be imported",)),
        ("rewards=[{name: 'os:system'}]", ("rewards: os:system",)),
        ("rewards=[{name: 'x:y'}]", ("rewards: 'x:y' cannot be imported",)),
        ("rewards=[{name: exact_match, options: {zzz: 1}}]", ("exact_match has no option 'zzz'",)),
        ("rewards=[{name: format_regex, options: {pattern: '('}}]", ("the options of format_regex are impossible",)),
    ],
)
def test_a_dry_run_refuses_what_engine_and_rewards_would(
    config: Path, override: str, parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if "not an argument" in parts[0] or "'auto' or " in parts[0]:
        pytest.importorskip("vllm", reason="the names of the arguments are those of the installed vLLM")
    sentence = refusal(config, "--dry-run", override)
    assert [part for part in parts if part not in sentence] == [], sentence
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("tuning.method=lora", "tuning.adapter.targets=[q_prj]"), "tuning.adapter.targets has 'q_prj'"),
        (("tuning.method=lora", "tuning.adapter.rank=0"), "tuning.adapter.rank is 0: set it to a number >= 1"),
        (("tuning.method=freeze", "tuning.train_layers=4"), "tuning.train_layers is 4, and the model has 3 layers"),
        (("tuning.method=qlora",), "did you mean lora?"),
    ],
)
def test_a_dry_run_refuses_what_cannot_be_tuned(config: Path, overrides: tuple[str, ...], named: str) -> None:
    assert named in refusal(config, "--dry-run", *overrides)


def test_a_dry_run_of_a_good_configuration_says_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.main(["--config", str(config), "--dry-run", "rollout.vllm.max_num_seqs=8"])
    assert "max_num_seqs: 8" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["", "x", "0", "-1", "1e3", "9" * 5000, "²"])
def test_a_number_of_processes_that_is_none(config: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", number)
    assert "start with torchrun" in refusal(config)


def test_malformed_model_config(config: Path) -> None:
    file = config.parent / "model" / "config.json"
    file.write_text(file.read_text()[:-20])
    sentence = refusal(config)
    assert f"{file} (of model.path) is not valid JSON" in sentence and "copy the model again" in sentence


def test_unknown_architecture(config: Path) -> None:
    change_model(config, architectures=["MambaForCausalLM"])
    sentence = refusal(config)
    assert "MambaForCausalLM" in sentence and "choose a model of " in sentence and "Qwen2ForCausalLM" in sentence


def test_configuration_that_is_not_there(tmp_path: Path) -> None:
    sentence = refusal(tmp_path / "gone.yaml")
    assert f"configuration {tmp_path / 'gone.yaml'} cannot be read" in sentence


def pretend_torch_npu(folder: Path, version: str) -> Path:
    """What an installed torch_npu looks like from outside; it is refused before it would be imported."""
    (folder / "torch_npu").mkdir(parents=True)
    (folder / "torch_npu" / "__init__.py").write_text("raise AssertionError('torch_npu was imported')\n")
    metadata = folder / f"torch_npu-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n")
    return folder


MATCHING = ".".join(torch.__version__.split(".")[:2]) + ".0"


@pytest.mark.parametrize(
    ("torch_npu", "variables", "overrides", "parts"),
    [
        (None, {}, (), ("platform.name is 'npu', but torch_npu is not installed: install",)),
        ("1.11.0", {}, (), ("torch_npu 1.11.0 does not load with torch", "equal first numbers")),
        (MATCHING, {}, (), ("CANN is missing (libascendcl.so is not found): install it, and source", "name=cpu")),
        (None, {"ASCEND_RT_VISIBLE_DEVICES": "1, 2"}, (), ("'1, 2'", "joined by commas without blanks")),
        (None, {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, (), ("a sleeping engine", "enable_sleep_mode")),
        (None, {"VLLM_ASCEND_ENABLE_NZ": "1"}, (), ("VLLM_ASCEND_ENABLE_NZ is '1'", "set it to 0")),
        (None, {"HCCL_DETERMINISTIC": "false"}, ("platform.deterministic=true",), ("HCCL_DETERMINISTIC is 'false'",)),
        (None, {}, ("platform.mindspeed.mode=maybe",), ("platform.mindspeed.mode is 'maybe'", "auto, required, off")),
        (
            None,
            {},
            ("platform.mindspeed.mode=off", "platform.mindspeed.features={moe_zero_memory: level0}"),
            ("platform.mindspeed.features has 'moe_zero_memory'", "mode is 'off': set it to auto"),
        ),
    ],
)
def test_an_ascend_machine_that_is_not_ready(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    torch_npu: str | None,
    variables: dict[str, str],
    overrides: tuple[str, ...],
    parts: tuple[str, ...],
) -> None:
    monkeypatch.setattr(platform, "_selected", None)
    if torch_npu is not None:
        monkeypatch.syspath_prepend(str(pretend_torch_npu(tmp_path / "packages", torch_npu)))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    sentence = refusal(config, "platform.name=npu", *overrides)
    assert [part for part in parts if part not in sentence] == [], sentence
    assert "\n" not in sentence and dict(os.environ) == before  # what was set on the way is taken back


def test_a_missing_cann_ends_the_command_with_one_sentence(config: Path, tmp_path: Path) -> None:
    packages = pretend_torch_npu(tmp_path / "packages", MATCHING)
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    arguments = ("--config", str(config), "platform.name=auto")
    launched = run((sys.executable, train.__file__, *arguments), env={"PYTHONPATH": path, "MEGA_RL_PLATFORM": ""})
    assert launched.returncode == 2
    (line,) = launched.stdout.splitlines()
    assert line.startswith("error: torch_npu is installed, but CANN is missing (libascendcl.so"), line


def command(config: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Launched:
    script = Path(train.__file__)
    return run_copy(script, "--config", config, *arguments, env=env)


def test_exit_status_and_one_sentence(config: Path) -> None:
    launched = command(config, "optimizer.lr=-1")
    assert launched.returncode == 2
    lines = launched.stdout.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), launched.stdout
    assert "optimizer.lr is -1" in lines[0], lines[0]


def test_dry_run_prints_a_configuration_that_loads_again(config: Path, tmp_path: Path) -> None:
    launched = command(config, "--dry-run", "optimizer.lr=3e-4").check()
    printed = tmp_path / "printed.yaml"
    printed.write_text(launched.stdout)
    assert load_config(printed) == load_config(config, ["optimizer.lr=3e-4"])
    assert not (tmp_path / "run").exists()


# The start of tools/train.py itself, but that reading the configuration never ends.
HELD_START = """
import os, runpy, time
import mega_rl.config
from tools import train

def hold(*_):
    print(f"held {os.getpid()}\\n", end="", flush=True)
    time.sleep(3600)

mega_rl.config.load_config = hold
runpy.run_path(train.__file__, run_name="__main__")
"""


@pytest.mark.slow
def test_ranks_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "held.py"
    script.write_text(HELD_START)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary)}
    with started(torchrun_command(script, "--config", "none", nproc=2), env=env) as running:
        deadline = time.monotonic() + 120
        while len(ranks := [int(pid) for pid in re.findall(r"held (\d+)\n", running.output())]) < 2:
            assert running.process.poll() is None and time.monotonic() < deadline, running.output()
            time.sleep(0.05)
        assert all(alive(pid) for pid in ranks)
        running.process.kill()
        running.process.wait()
        deadline = time.monotonic() + 60  # the kernel needs none of it; without its signal they sleep for an hour
        while any(alive(pid) for pid in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in ranks if alive(pid)] == []
    assert list(temporary.iterdir()) == [], "torchrun's directory is removed once the ranks have begun"


@pytest.mark.parametrize(
    ("at_parent", "at_rank", "status"),
    [("", "TORCHELASTIC_RUN_ID=1", 1), ("TORCHELASTIC_RUN_ID=1", "", 0), ("", "", 0)],
)
def test_a_rank_whose_torchrun_is_gone_already_ends(at_parent: str, at_rank: str, status: int) -> None:
    """Its parent is then a process that is not Python and was not started by torchrun: here a shell."""
    code = "from tools.train import end_with_torchrun; end_with_torchrun(); print('went on')"
    shell = f'{at_rank} {sys.executable} -c "{code}"; exit $?'
    launched = run(["env", "-u", "TORCHELASTIC_RUN_ID", *at_parent.split(), "sh", "-c", shell], timeout=280)
    assert launched.returncode == status
    assert ("torchrun died" in launched.stdout) == (status == 1) and ("went on" in launched.stdout) == (status == 0)


def test_a_recipe_without_its_base_is_told_of_it() -> None:
    folder = REPO / "configs" / "grpo_gsm8k"
    for files, is_told in ((["qwen2.5_0.5b.yaml"], True), (["base.yaml", "qwen2.5_0.5b.yaml"], False)):
        asked = [word for name in files for word in ("--config", str(folder / name))]
        with pytest.raises(InputError) as raised:
            train.main([*asked, "--dry-run", "model.path=nowhere"])
        hint = f"A file of that folder may need its base: put --config {folder / 'base.yaml'} first"
        assert "model.path is 'nowhere'" in str(raised.value) and (hint in str(raised.value)) == is_told
