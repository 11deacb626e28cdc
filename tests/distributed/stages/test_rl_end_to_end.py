"""Reinforcement learning through ``tools/train.py``: Megatron-core and vLLM in the same two processes, in float32."""

from __future__ import annotations

import html
import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from mega_rl.algorithms import advantage, policy_loss
from mega_rl.config import load_config
from mega_rl.data.rows.rows import read_rows
from mega_rl.observe.sinks.tensorboard import tag
from mega_rl.rewards.functions.registry import load_reward
from mega_rl.rollout.collect.records import read_step
from tests.launching import training
from tests.launching.counted_collectives import MOST_OBJECTS, read, total
from tests.launching.launch import ENGINE, REPO, Launched, run_copy, started, torchrun_command
from tests.launching.training import TinyWorld, computed, digests, metrics_of, steps_saved

pytestmark = pytest.mark.slow
TOTAL_STEPS = 6
AQN = ("sigma", "stage", "effective_sigma", "changed_fraction", "num_tensors", "noise_hash", "kl_clean_noisy")
GROUPS = ("generated", "dropped", "kept", "carried_in", "carried_out", "budget_exhausted")
ENGINE_ONLY = ("bridge/", "aqn/", "val-")  # a replay has no engine whose weights would move
SAMPLED = ("reward/", "response_length/", "prompt_length/", "val-core/", "val-aux/")


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rl")


@pytest.fixture(scope="module")
def whole(tiny_world: TinyWorld, runs_dir: Path) -> Launched:
    """The uninterrupted run in ``runs_dir/whole``: the trainer with sequence parallelism, one engine of two ranks."""
    return training.train(tiny_world.rl, runs_dir / "whole").check()


@pytest.fixture(scope="module")
def whole_run(whole: Launched, runs_dir: Path) -> Path:
    return runs_dir / "whole"


def weight_sigmas(metrics: dict[int, dict[str, float]]) -> dict[int, float]:
    """Training step -> sigma of the noise on the weights that sampled it."""
    return {step: row["aqn/sigma"] for step, row in metrics.items() if step > 0}


def test_every_step_is_logged_once_and_is_finite(whole_run: Path) -> None:
    metrics = metrics_of(whole_run)
    assert list(metrics) == list(range(TOTAL_STEPS + 1))  # 0: the validation before training
    assert all(row["rollout/weight_version"] == step - 1 for step, row in metrics.items() if step > 0)
    assert all(row["actor/grad_norm"] > 0 and row["reward/std"] > 0 for step, row in metrics.items() if step > 0)


def test_trainer_and_engine_agree(whole_run: Path) -> None:
    metrics = metrics_of(whole_run)
    assert weight_sigmas(metrics) == {1: 0, 2: 0, 3: 0.2, 4: 0.2, 5: 0.05, 6: 0.05}
    for step in range(1, TOTAL_STEPS + 1):
        row = metrics[step]
        assert (row["actor/ratio_mean"], row["actor/ratio_max"], row["actor/ppo_kl"]) == (1.0, 1.0, 0.0), step
        if row["aqn/sigma"] == 0:
            assert row["rollout/logprob_diff_mean"] < 1e-5
            assert row["rollout/logprob_diff_max"] < 1e-3
            assert row["actor/importance_weight"] == pytest.approx(1.0, abs=1e-5)
        else:  # the engine's policy is the noisy one
            assert 1e-3 < row["rollout/logprob_diff_mean"] < 1.0
            assert row["aqn/kl_clean_noisy"] == row["rollout/kl"] != 0
    assert metrics[1]["actor/kl"] == pytest.approx(0.0, abs=1e-9)  # the reference is the starting policy
    assert metrics[6]["actor/kl"] > 1e-5


def test_noise_is_on_and_new_at_every_sync(whole_run: Path) -> None:
    metrics = metrics_of(whole_run)
    noisy = {step: row for step, row in metrics.items() if row.get("aqn/sigma")}
    assert list(noisy) == [3, 4, 5, 6]
    for row in noisy.values():
        assert all(f"aqn/{name}" in row for name in AQN)
        assert row["aqn/effective_sigma"] == pytest.approx(row["aqn/sigma"], rel=0.15)
        assert (row["aqn/changed_fraction"], row["aqn/num_tensors"]) == (1.0, 4.0)
    assert len({row["aqn/noise_hash"] for row in noisy.values()}) == len(noisy)
    assert all("aqn/noise_hash" not in metrics[step] for step in (0, 1, 2))


def test_files_of_the_run(whole: Launched, whole_run: Path, tiny_world: TinyWorld) -> None:
    given = load_config(tiny_world.rl, [f"trainer.output_dir={whole_run}"])
    given.parallel.overlap_grad_reduce = given.parallel.overlap_param_gather = False  # what null comes to here
    assert load_config(whole_run / "config.yaml") == given
    assert steps_saved(whole_run) == [2, 4, 6]
    assert {path.name for path in whole_run.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "environment.txt",
        "huggingface",
        "metrics.jsonl",
        "run.log",
        "tensorboard",
    }
    assert "error" not in whole.stdout.lower()
    log = (whole_run / "run.log").read_text()
    assert all(f"rank 0 {entry}" in log for entry in ("START", "MESSAGE checkpoint: ", "END of the run"))


def test_validation_metrics(whole_run: Path) -> None:
    metrics = metrics_of(whole_run)
    names = {f"val-core/arithmetic/{name}" for name in ("greedy/acc", "acc/mean@1", "acc/best@2")}
    validated = [step for step, row in metrics.items() if names <= row.keys()]
    assert validated == [0, 3, 6]
    assert all(step in validated or not names & row.keys() for step, row in metrics.items())


def test_tensorboard_has_the_same_numbers(whole_run: Path) -> None:
    events = EventAccumulator(str(whole_run / "tensorboard"))
    events.Reload()
    metrics = metrics_of(whole_run)
    names = {name for row in metrics.values() for name in row}
    assert set(events.Tags()["scalars"]) == {tag(name) for name in names}
    for name in names:
        logged = {step: row[name] for step, row in metrics.items() if name in row}
        assert {event.step: event.value for event in events.Scalars(tag(name))} == pytest.approx(logged, rel=1e-6)


def test_exported_model_answers_as_the_validated_one(whole_run: Path, tiny_world: TinyWorld) -> None:
    texts = EventAccumulator(str(whole_run / "tensorboard"))
    texts.Reload()
    config = load_config(tiny_world.rl)
    tokenizer = AutoTokenizer.from_pretrained(whole_run / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(whole_run / "huggingface").eval()
    rewards = [(load_reward(reward.name), reward.weight) for reward in config.rewards]
    scores, answers = [], set()
    shown = texts.Tensors("samples/validation/text_summary")[-1]
    assert shown.step == TOTAL_STEPS
    table = shown.tensor_proto.string_val[0].decode().splitlines()[2:]
    for line, row in zip(table, read_rows(config.data.val_files, "data.val_files"), strict=True):
        prompt_ids = tokenizer(row.get("prompt"), add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            output = model.generate(prompt_ids, do_sample=False, max_new_tokens=config.data.max_response_length)
        answer = tokenizer.decode(output[0, prompt_ids.shape[1] :], skip_special_tokens=True)
        cells = [html.unescape(cell) for cell in line.removeprefix("| ").removesuffix(" |").split(" | ")]
        assert cells[:3] == [row.get("prompt"), answer, str(row.get("answer"))]
        given = {"data_source": "arithmetic", "ground_truth": row.get("answer"), "extra_info": {}}
        scores.append(sum(weight * reward(solution_str=answer, **given) for reward, weight in rewards))
        answers.add(answer)
    assert len(answers) > 2, "a model that answers everything alike would hide mistakes"
    logged = metrics_of(whole_run)[TOTAL_STEPS]["val-core/arithmetic/greedy/acc"]
    assert sum(scores) / len(scores) == pytest.approx(logged)


def test_resume_after_kill_is_exact(whole: Launched, whole_run: Path, tiny_world: TinyWorld, runs_dir: Path) -> None:
    output_dir = runs_dir / "killed"
    arguments = ("log", 5, "--config", tiny_world.rl, f"trainer.output_dir={output_dir}")
    with started(torchrun_command(training.HELD, *arguments)) as running:
        running.wait_for("held at log 5", timeout=600)  # the end of the block sends SIGKILL to all of its processes
    assert list(metrics_of(output_dir)) == [0, 1, 2, 3, 4, 5]
    assert steps_saved(output_dir) == [2, 4]

    resumed = training.train(tiny_world.rl, output_dir).check()
    assert "resuming after step 4" in resumed.stdout
    expected = {step: computed(row) for step, row in metrics_of(whole_run).items()}
    assert {step: computed(row) for step, row in metrics_of(output_dir).items()} == expected
    assert digests(output_dir / "huggingface") == digests(whole_run / "huggingface")
    assert steps_saved(output_dir) == [2, 4, 6]
    table = whole.stdout[whole.stdout.index("Held-out problems") :].split("checkpoint:")[0]
    assert table in resumed.stdout  # the validation before training came with the checkpoint
    events = EventAccumulator(str(output_dir / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars(tag("reward/mean"))] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tensor=1", "parallel.sequence=false", "rollout.weight_update=reload", "bridge.verify=off"),
        ("parallel.tensor=2",),
    ],
    ids=["data_parallel_2_reload", "tensor_parallel_2_live"],
)
def test_two_engines_of_one_rank(
    layout: tuple[str, ...], whole_run: Path, tiny_world: TinyWorld, tmp_path: Path
) -> None:
    """The same samples, rewards and noise as with one engine of two ranks, whatever the trainer's layout."""
    overrides = ("rollout.tensor_parallel_size=1", "checkpoint.save_freq=3", "checkpoint.export_hf=false", *layout)
    log = tmp_path / "asked.jsonl"
    training.copies(tiny_world.rl, tmp_path / "run", *overrides, modules=ENGINE, counted=log).check()
    asked = read(log)  # steps 3 and 6 have noise, a validation, a checkpoint and, with live weights, their proof
    assert all(0 < total(asked[step]) <= MOST_OBJECTS for step in range(1, TOTAL_STEPS + 1)), asked
    assert {"saving._publish", "evaluate.summarized", "replicas.collect_everywhere"} <= asked[3].keys(), asked[3]
    metrics, expected = metrics_of(tmp_path / "run"), metrics_of(whole_run)
    assert list(metrics) == list(expected)
    for step in (0, 1):  # the weights are still the starting ones
        assert sampled(metrics[step]) == sampled(expected[step])
    assert {"reward/mean", "response_length/mean", "reward/digits"} <= sampled(metrics[1]).keys()
    for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "rollout/entropy"):
        assert metrics[1][name] == pytest.approx(expected[1][name], rel=1e-4, abs=1e-7), name
    for step in range(1, TOTAL_STEPS + 1):
        row = metrics[step]
        assert row["rollout/logprob_diff_mean"] < (1e-5 if row["aqn/sigma"] == 0 else 1.0), step
        assert (row["actor/ratio_mean"], row["actor/ppo_kl"]) == (1.0, 0.0), step
        assert row.get("aqn/noise_hash") == expected[step].get("aqn/noise_hash"), step


def sampled(metrics: dict[str, float]) -> dict[str, float]:
    """What depends on nothing but the samples."""
    return {name: value for name, value in metrics.items() if name.startswith(SAMPLED)}


def test_dynamic_sampling_recorded_and_replayed(tiny_world: TinyWorld, tmp_path: Path) -> None:
    """Groups are dropped, replaced and carried; from the file and a checkpoint alone, training goes the same way.

    It does so too by copies of the built-in loss and advantage that are a user's own.
    """
    dynamic = "algorithm.dynamic_sampling"
    overrides = (
        *(f"{dynamic}.{setting}" for setting in ("enabled=true", "oversample=2", "budget=3", "metric=digits")),
        "rollout.n=3",
        "trainer.total_steps=4",
        "checkpoint.export_hf=false",
    )
    layout = ("rollout.tensor_parallel_size=1", "logging.dump_rollouts=3")
    first = tmp_path / "first"
    training.copies(tiny_world.rl, first, *overrides, *layout, modules=ENGINE).check()
    metrics = metrics_of(first)
    for step in range(1, 5):
        groups = {name: metrics[step][f"rollout/groups_{name}"] for name in GROUPS}
        carried = metrics[step - 1]["rollout/groups_carried_out"] if step > 1 else 0
        assert groups["carried_in"] == carried and groups["generated"] <= 12
        assert groups["generated"] + carried == groups["kept"] + groups["carried_out"] + groups["dropped"]
        assert groups["kept"] == 4 or groups["budget_exhausted"] == 1
    assert sum(metrics[step]["rollout/groups_dropped"] for step in range(1, 5)) > 0
    assert metrics[2]["rollout/groups_carried_out"] > 0, "the checkpoint below would carry nothing"

    assert [path.name for path in sorted((first / "rollouts").iterdir())] == [f"step_00000{n}.jsonl" for n in (2, 3, 4)]
    rows = read_step(first / "rollouts", 3)
    assert {row["outcome"] for row in rows} <= {"learnt", "carried", "dropped"}
    learnt = [row for row in rows if row["outcome"] == "learnt"]
    assert len(learnt) == 3 * metrics[3]["rollout/groups_kept"]
    fresh = [row["logprob_diff"] for row in learnt if row["weight_version"] == 2 and metrics[3]["aqn/sigma"] == 0]
    assert all(difference < 1e-5 for difference in fresh)
    assert all(row["advantage"] is not None and row["logprob_diff"] >= 0 for row in learnt)

    second = tmp_path / "second"
    resumed = (f"checkpoint.resume={training.checkpoint(first, 2)}", f"rollout.replay={first / 'rollouts'}")
    losses, advantages = (shutil.copy(module.__file__, tmp_path) for module in (policy_loss, advantage))
    own = (f"algorithm.objective={losses}:ppo_clip_loss", f"algorithm.advantage={advantages}:grpo_advantages")
    training.copies(tiny_world.rl, second, *overrides, *resumed, *own).check()
    for step, row in metrics_of(second).items():
        trained = {name: value for name, value in computed(row).items() if not name.startswith(ENGINE_ONLY)}
        assert trained and trained.items() <= metrics[step].items(), step
    assert list(metrics_of(second)) == [3, 4]


def test_gsm8k_configuration(gsm8k_dir: Path, tmp_path: Path) -> None:
    """The shipped configuration on the real data set, with nothing but paths and sizes changed."""
    data, model, output_dir = tmp_path / "data", tmp_path / "model", tmp_path / "run"
    run_copy(Path("tools/prepare_data.py"), "gsm8k", "--source", gsm8k_dir, "--out", data).check()
    make = ["--tokenizer", "bpe", "--bpe-text", gsm8k_dir / "train.jsonl", "--vocab-size", 1024]
    make += ["--num-layers", 2, "--max-positions", 1024, "--out", model]
    run_copy(Path("tools/make_tiny_model.py"), *make).check()
    overrides = (
        f"model.path={model}",
        f"data.train_files=[{data / 'train.parquet'}]",
        f"data.val_files=[{data / 'test.parquet'}]",
        "data.train_batch_size=2",
        "data.max_response_length=16",
        "data.max_val_samples=2",
        "trainer.total_steps=2",
    )
    training.copies(REPO / "configs" / "quickstart_gsm8k" / "grpo.yaml", output_dir, *overrides, modules=ENGINE).check()
    metrics = metrics_of(output_dir)
    assert list(metrics) == [0, 1, 2]
    assert all("val-core/openai/gsm8k/greedy/acc" in metrics[step] for step in (0, 2))
    for step in (1, 2):
        row = metrics[step]
        assert row["rollout/logprob_diff_mean"] < 1e-5 and row["actor/ratio_mean"] == 1.0
        assert 0 < row["response_length/mean"] <= 16 and row["prompt_length/mean"] > 50
        assert 0 <= row["reward/mean"] <= 1
    assert AutoModelForCausalLM.from_pretrained(output_dir / "huggingface").config.vocab_size == 1024
