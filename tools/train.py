"""Train: ``torchrun --nproc-per-node 8 tools/train.py --config FILE [key=value ...]``.

Exit status 0 after a finished run, 2 for input that a user can fix (one sentence on stderr), 75 for a run that a signal
stopped after its step, with a checkpoint, 1 for anything else.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from mega_rl import platform
from mega_rl.algorithms.trial import check_own
from mega_rl.bridge.mapping.tensors import roles
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.config import load_config, samples, to_yaml, validate, workers_rewards
from mega_rl.config.checks.model import trained_shape
from mega_rl.config.load import naming_forgotten_bases
from mega_rl.config.schema.sections import RunConfig
from mega_rl.errors import Stopped
from mega_rl.observe.lines import write_whole_lines
from mega_rl.parallel.watch.process import end_with_torchrun, fail, processes
from mega_rl.rewards.scorer import build_scorer
from mega_rl.rollout.vllm.start.options import check_options, check_whole_prompts, installed_arguments

STAGES = {name: f"mega_rl.stages.{name}" for name in ("rl", "pt", "sft", "rm", "dpo", "kto")}
STOPPED = 75  # exit status: sysexits.h's EX_TEMPFAIL, "try again later"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML file, see configs/README.md; repeatable: each changes those before it",
    )
    parser.add_argument("--dry-run", action="store_true", help="validate, print the resolved configuration, and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example optimizer.lr=1e-6")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    config = load_config(options.config, options.overrides)
    platform.check_name(config.platform.name)
    world_size = processes()
    with naming_forgotten_bases(options.config):
        validate(config, world_size if options.dry_run else world_size or 1)
    tuning_plan(config.tuning, trained_shape(config), config.model.vision)  # refuses names that the model does not have
    if options.dry_run:
        if samples(config):
            check_sampling(config)
        print(to_yaml(config))
        return
    # The platform is fixed before the stage is imported: Megatron-core looks for its device while it is imported.
    role = platform.trainer_role(config.rollout if samples(config) else None, config.platform.deterministic)
    platform.select(config.platform.name, role, config.platform.mindspeed)
    if os.environ.get("RANK", "0") == "0":
        print("".join(f"{line}\n" for line in platform.environment_report()), end="", flush=True)
    importlib.import_module(STAGES[config.trainer.stage]).run(config)


def check_sampling(config: RunConfig) -> None:
    """What the engine and the reward workers of a run would refuse as they start; nothing heavy is started.

    Raises:
        InputError: an argument of vLLM that is not one or is ours, a reward, loss or advantage that cannot be used,
            noise for no tensor.
    """
    check_own(config.algorithm)
    if config.aqn.enabled:
        AqnNoise(config.aqn, total_steps=1).targets(roles(trained_shape(config)))
    if config.rollout.replay is None:
        check_options(config.rollout.vllm, installed_arguments(), config.platform.name)
        length = config.data.max_prompt_length + config.data.max_response_length
        check_whole_prompts(config.rollout, length, config.platform.name)
    if rewards := workers_rewards(config):
        build_scorer(rewards, replace(config.reward_workers, num_workers=1)).close()


def stop(reason: Stopped) -> None:
    """Leave a run that was asked to end; nothing is left to do."""
    if os.environ.get("RANK", "0") == "0":
        print(reason)
    sys.stdout.flush()
    os._exit(STOPPED)


if __name__ == "__main__":
    write_whole_lines()
    end_with_torchrun()
    try:
        main()
    except Stopped as reason:
        stop(reason)
    except Exception as error:  # noqa: BLE001 - the last frame: whatever it is, the exit status says so
        fail(error)
