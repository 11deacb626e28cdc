"""Evaluate: ``python tools/eval.py MODEL --data FILE --reward NAME --out DIR [options] [key=value ...]``.

MODEL is a Hugging Face directory, the id of a model in a local cache, a checkpoint of ours, or the directory of a run,
whose configuration then gives rewards, templates and lengths. Several colocated engines: ``mega-rl eval`` or torchrun.
The same command continues an evaluation that was cut. See docs/evaluation.md.

Examples:
  python tools/eval.py runs/a --data test.jsonl --samples 8 --k 1 4 8 --out runs/a/eval
  python tools/eval.py Qwen/Qwen3-8B --data aime.parquet --reward math_verify --samples 16 --out runs/aime \\
      data.max_response_length=8192
  python tools/eval.py Qwen/Qwen3-8B --adapter runs/b/adapter --data test.jsonl --reward gsm8k --out runs/b/eval
  python tools/eval.py --compare runs/a/eval runs/b/eval

Exit status 0 after a finished evaluation, 2 for input that a user can fix, 1 for anything else.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mega_rl import platform
from mega_rl.config import RunConfig
from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.data.pictures.image_processor import picture_reader
from mega_rl.data.pictures.picture_set import PictureSet, has_pictures
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.rows.rows import DataFiles, rows_of
from mega_rl.data.tokens.tokenizer import load_tokenizer
from mega_rl.errors import InputError
from mega_rl.evaluation.configuration import DATA, check, check_layout, evaluation_config, settings_of
from mega_rl.evaluation.evaluate import AnsweredPrompt, EvaluationSettings, evaluate
from mega_rl.evaluation.exporting import export
from mega_rl.evaluation.grading import Grading
from mega_rl.evaluation.presentation import print_comparison, report
from mega_rl.evaluation.records import RESULTS, Directory, RecordPart
from mega_rl.evaluation.summary import Bootstrap, default_ks
from mega_rl.evaluation.weights import EvaluatedWeights, find_weights, with_adapter
from mega_rl.models.shape import read_model_shape
from mega_rl.observe.lines import write_whole_lines
from mega_rl.parallel.collectives import broadcast_object, gather_objects, is_first, together
from mega_rl.parallel.layout import EngineLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.parallel.store import shared_store
from mega_rl.parallel.watch.process import end_with_torchrun, fail, join, processes
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.engine import ProbedSampler, Sampler
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.remote.engines import RemoteEngines
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.rollout.vllm.start.seeing import Sight
from mega_rl.stages.run.episodes import plan_of, with_episodes
from mega_rl.stages.score.scoring import check_sources, scorer_of_node, truth_is_needed
from mega_rl.types import Prompt

EXPORT = "model"  # under the output directory: weights that had to be exported or merged, until the answers are there
ADAPTER = "--adapter"
NEWS_S = 10.0  # between two lines about the progress
LAYOUT = {  # keys that options stand for, since mega-rl reads them before it starts processes
    "rollout.tensor_parallel_size": "--tensor-parallel",
    "rollout.num_engines": "--engines",
    "rollout.placement": "--placement",
}
MEMORY_SHARE = 0.9  # of a device's memory, which the engine has for itself


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model directory or id, checkpoint, or directory of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as data.max_response_length=512")
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        help="repeatable; default: that of the run the model is from",
    )
    parser.add_argument(ADAPTER, type=Path, metavar="DIR", help="of PEFT's files, for MODEL: merged into it")
    parser.add_argument(DATA, action="append", metavar="FILE", help=".jsonl, .json, .parquet; default: the run's own")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory of the results")
    parser.add_argument("--reward", action="append", metavar="NAME", help="instead of the configuration's; repeatable")
    parser.add_argument("--samples", type=int, metavar="N", help="sampled answers per problem (default: validation.n)")
    parser.add_argument("--temperature", type=float, help="of these (default: validation.temperature)")
    parser.add_argument("--no-greedy", action="store_true", help="no greedy answer beside the sampled ones")
    parser.add_argument("--seed", type=int, help="of sampling (default: trainer.seed)")
    parser.add_argument("--max-problems", type=int, metavar="N", help="the first rows of the data only")
    parser.add_argument("--k", type=int, nargs="+", help="of pass@k and maj@k (default: 1, 2, 4, ... and n)")
    parser.add_argument(
        "--right-by",
        metavar="REWARD",
        help="tells right from wrong (default: the first with a truth); environment: what it gave itself, so that "
        "episodes without a reward of its own count as unknown",
    )
    parser.add_argument("--right-at", type=float, default=1.0, metavar="VALUE", help="right from here on (default 1)")
    parser.add_argument("--engines", type=int, metavar="N", help="number of engines")
    parser.add_argument("--tensor-parallel", type=int, metavar="N", help="processes per engine (default 1)")
    parser.add_argument("--placement", choices=["colocated", "separate"], help="separate: through Ray")
    parser.add_argument("--resamples", type=int, default=1000, metavar="N", help="of the bootstrap (default 1000)")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="results of two evaluations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison")
    options = parser.parse_intermixed_args(arguments)
    if options.compare is None and (options.model is None or options.out is None):
        parser.error("give MODEL and --out DIR, or --compare A B")
    if options.compare is not None and options.model is not None:
        parser.error(f"--compare takes results that are there: leave {options.model} out")
    if options.resamples < 1:
        parser.error(f"--resamples is {options.resamples}; it must be positive")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.compare is not None:
        boot = Bootstrap(options.seed or 0, options.resamples)
        first, second = options.compare
        print_comparison(first, second, options.right_by, options.right_at, boot, options.json)
        return
    weights = find_weights(options.model)
    if options.adapter is not None:
        weights = with_adapter(weights, options.adapter, ADAPTER)
    config = configured(options, weights)
    world_size, is_greedy = processes() or 1, not options.no_greedy
    ks = sorted(set(options.k)) if options.k is not None else default_ks(config.validation.n)
    platform.check_name(config.platform.name)
    check_layout(options.engines, config, world_size)
    check(config, world_size, ks, is_greedy)
    has_environment = config.environment.name is not None
    grading = Grading.of(config.rewards, options.right_by, options.right_at, has_environment)
    settings = settings_of(config, weights, is_greedy)
    config.rollout.weight_update = "reload"  # engines load for themselves, in the form that is fastest
    here = platform.select(config.platform.name, platform.engine_role(config.rollout, config.platform.deterministic))
    device = join(config)
    if here.has_own_memory:
        config.rollout.vllm.setdefault("gpu_memory_utilization", MEMORY_SHARE)
        config.rollout.vllm.setdefault("enable_sleep_mode", False)
    here.seed(config.trainer.seed)
    directory: Directory | None = None
    with together("preparing the output directory"):
        if is_first():
            directory = Directory(options.out, settings)
    answer_all(options.out, directory, config, weights, is_greedy, device)
    if directory is not None:
        report(options.out, ks, grading, Bootstrap(config.trainer.seed, options.resamples))
        directory.release()
    dist.barrier()
    dist.destroy_process_group()


def configured(options: argparse.Namespace, weights: EvaluatedWeights) -> RunConfig:
    """The configuration that the options change.

    Raises:
        InputError: an override sets what only an option sets; or as ``evaluation_config``.
    """
    for override in options.overrides:
        key, _, value = override.partition("=")
        if option := LAYOUT.get(key.strip()):
            raise InputError(f"{key.strip()} of an evaluation is set by {option}: write {option} {value.strip()}")
    config = evaluation_config(options.config or weights.run_config, options.overrides, weights)
    config.data.val_files = options.data or config.data.val_files
    config.data.max_val_samples = options.max_problems
    config.rewards = [RewardConfig(name) for name in options.reward] if options.reward else config.rewards
    for section, name, value in (
        (config.validation, "n", options.samples),
        (config.validation, "temperature", options.temperature),
        (config.trainer, "seed", options.seed),
        (config.rollout, "placement", options.placement or "colocated"),
        (config.rollout, "tensor_parallel_size", 1 if options.tensor_parallel is None else options.tensor_parallel),
    ):
        if value is not None:
            setattr(section, name, value)
    is_separate = config.rollout.placement == "separate" and options.engines is not None
    config.rollout.num_engines = options.engines if is_separate else 1
    return config


def answer_all(
    out: Path,
    directory: Directory | None,
    config: RunConfig,
    weights: EvaluatedWeights,
    is_greedy: bool,
    device: torch.device,
) -> None:
    """Answer the problems that have no answers yet, and put the results in order. Collective.

    Args:
        directory: on rank 0 only.
    """
    if broadcast_object(directory is not None and directory.is_complete):
        say(f"{out / RESULTS} is complete: nothing is left to be answered")
        return
    tokenizer = load_tokenizer(config.model.path)
    with together("making an environment"):
        plan = plan_of(config, tokenizer)
    picture_set = picture_set_of(config, tokenizer)
    prompts = PromptDataset.from_files(
        DataFiles.validation(config.data, DATA),
        tokenizer,
        config.data,
        needs_truth=partial(truth_is_needed, config),
        tools=() if plan is None else plan.tools,
        picture_set=picture_set,
    )
    check_sources(config, prompts.prompts, DATA)
    if prompts.num_dropped:
        say(f"{prompts.num_dropped} prompts longer than {config.data.max_prompt_length} tokens left out")
    done: set[int] = broadcast_object(directory.done() if directory is not None else set())
    missing = [prompt for prompt in prompts.prompts if prompt.index not in done]
    if done:
        say(f"continuing: {len(done)} of {len(prompts)} problems are answered")
    if missing:
        # without rewards the environment gives them
        pictures = None if picture_set is None else picture_set.pictures
        scorer = Scorer([], None)
        if config.rewards:
            scorer = scorer_of_node(config.rewards, config.reward_workers, pictures=pictures)
        if not weights.is_loadable:
            config.model.path = exported(weights, config.model.path, out / EXPORT)
        engine, layout = build_engine(config, device, picture_set)
        settings = EvaluationSettings(
            layout,
            config.validation.n,
            config.validation.temperature,
            config.data.max_response_length,
            config.trainer.seed,
            is_greedy,
            with_logprobs=False,
        )
        sampler = with_episodes(config, layout, engine, plan)
        answer_missing(out, missing, sampler, scorer, settings, config.trainer.collective_timeout_s)
        scorer.close()
    dist.barrier()
    if directory is not None:
        directory.merge()
        shutil.rmtree(out / EXPORT, ignore_errors=True)


def answer_missing(
    out: Path,
    missing: Sequence[Prompt],
    engine: Sampler,
    scorer: Scorer,
    settings: EvaluationSettings,
    timeout_s: float,
) -> None:
    """Append the answers to every one of these problems to this rank's part of the results. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rendezvous = Rendezvous(shared_store(timeout_s), rank, world_size) if world_size > 1 else None
    part, begin = RecordPart(out, rank), time.monotonic()
    evaluate(engine, scorer, missing, settings, with_news(part, len(missing)), rendezvous)
    part.close()
    seconds = time.monotonic() - begin
    num_tokens = sum(gather_objects(part.num_tokens))
    say(f"{len(missing)} problems, {num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:,.0f} tokens/s")


def with_news(part: RecordPart, num_problems: int) -> Callable[[AnsweredPrompt], None]:
    """Appends to the part; the first rank tells how far it is."""
    begin = last = time.monotonic()

    def take(answered: AnsweredPrompt) -> None:
        nonlocal last
        part.append(answered)
        if is_first() and (now := time.monotonic()) - last > NEWS_S:
            last, rate = now, part.num_tokens / (now - begin)
            say(f"answered {part.num_problems} problems here, {num_problems} in all; {rate:,.0f} tokens/s here")

    return take


def exported(weights: EvaluatedWeights, model: str, target: Path) -> str:
    """The weights as a Hugging Face directory that engines load, made by the first rank. Collective.

    Args:
        model: Hugging Face directory with configuration and tokenizer.

    Raises:
        InputError: on every rank, what the tool refuses.
    """
    with together("making the files of the weights"):
        if is_first() and not target.is_dir():
            say(f"exporting {weights.directory}{'' if weights.adapter is None else f' with {weights.adapter}'}")
            export(weights, model, target, Path(__file__).resolve().parent)
    return str(target)


def picture_set_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PictureSet | None:
    """Takes the pictures of the problems; None: the model sees none, or there are none. Collective."""
    tower = read_model_shape(config.model.path).tower
    if tower is None:
        return None
    with together(f"looking for pictures in {DATA}"):
        rows = rows_of(config.data.val_files, DATA)
        is_seen = any(map(has_pictures, islice(rows, config.data.max_val_samples)))
    if not any(gather_objects(is_seen)):  # text needs neither an image processor nor a chat template
        return None
    with together("opening the image processor"):
        return PictureSet(picture_reader(config.model.path, tower, tokenizer, config.data))


def sight_of(picture_set: PictureSet | None, config: RunConfig) -> Sight | None:
    """What the engines see with; None: the problems have no pictures."""
    if picture_set is None or not picture_set.pictures:
        return None
    return Sight(picture_set.pictures, config.data.max_images, picture_set.reader.pixel_limits)


def build_engine(
    config: RunConfig, device: torch.device, picture_set: PictureSet | None
) -> tuple[ProbedSampler, EngineLayout]:
    """This rank's engine, or the hands of those elsewhere, and how the ranks share them. Collective."""
    world_size, rollout, sight = dist.get_world_size(), config.rollout, sight_of(picture_set, config)
    length = config.data.max_prompt_length + config.data.max_response_length
    if rollout.placement == "separate":
        spec = EngineSpec(
            str(Path(config.model.path).resolve()),
            rollout,
            length,
            config.model.dtype,
            platform.current().name,
            config.platform.deterministic,
            torch.get_num_threads(),
            config.trainer.collective_timeout_s,
            sight=sight and replace(sight, pictures={}),  # they come with the requests
        )
        return RemoteEngines(spec, rollout.num_engines, picture_set), EngineLayout(world_size, world_size)
    engine = VLLMEngine(
        config.model.path,
        rollout,
        max_model_len=length,
        device_type=device.type,
        dtype=config.model.dtype,
        sight=sight,
    )
    return engine, EngineLayout(world_size, rollout.tensor_parallel_size)


def say(sentence: str) -> None:
    if is_first():
        print(sentence, flush=True)


if __name__ == "__main__":
    write_whole_lines()
    end_with_torchrun()
    try:
        main()
    except Exception as error:  # noqa: BLE001 - the last frame: whatever it is, the exit status says so
        fail(error)
