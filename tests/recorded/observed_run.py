"""An output directory as a run leaves it, written by the writers of a run, with texts that a page must not believe."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mega_rl.config import save_resolved
from mega_rl.config.schema.sections import RunConfig
from mega_rl.observe import run_log
from mega_rl.observe.observer import Observer
from mega_rl.observe.run_log import RunLog
from mega_rl.observe.sinks.sinks import ShownSample
from mega_rl.rollout.collect.collect import PromptGroup
from mega_rl.rollout.collect.records import to_rows, write_step
from mega_rl.types import Prompt, Score, Trajectory

HOSTILE = "</pre><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">&lt; 數 😀"
SECTIONS_LOGGED = ("learning", "validation", "health", "agreement", "speed", "memory", "sync", "rollouts", "aqn")


def metrics_of(step: int, rate: float) -> dict[str, float]:
    """One metric of every section, and more where charts and tables are made of several."""
    reward = 1 - math.exp(-rate * step)
    found = {
        "reward/mean": reward,
        "reward/max": 1.0,
        "reward/min": 0.0,
        f"val-core/{HOSTILE}/greedy/acc": reward,
        "actor/kl": 0.01 * step if step != 3 else math.nan,
        "rollout/logprob_diff_mean": 1e-7,
        "throughput/tokens_per_s": 900.0 + step,
        "memory/peak_host_gib": 1.5,
        "memory/peak_host_gib/update": 1.4,
        "response_length/mean": 3.0,
        "aqn/sigma": 0.01 / step,
    }
    found |= {f"time/{phase}_s": 0.5 for phase in ("generate", "update", "sync")} | {"time/step_s": 1.6}
    return found | {f"bridge/{name}": 4096.0 for name in ("bytes_local", "bytes_sent", "bytes_minimum", "seconds")}


def bytes_tokenizer() -> Tokenizer:
    """One token for every byte, and an end of the sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({mark: number for number, mark in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


def group(index: int, response: str, rewards: Sequence[float]) -> PromptGroup:
    """Answers to one prompt, of equal text; their tokens are less and less probable."""
    tokenizer = bytes_tokenizer()
    prompt = Prompt(index, tuple(tokenizer.encode("3+4=").ids), f"3+4= {HOSTILE}", "7", "arithmetic")
    ids = [*tokenizer.encode(response).ids, tokenizer.token_to_id("<eos>")]
    logprobs = [-8.0 * position / len(ids) for position in range(len(ids))]
    trajectories = [
        Trajectory.single_turn(prompt, number, ids, logprobs, response, "stop", 4) for number in range(len(rewards))
    ]
    return PromptGroup(tuple(trajectories), tuple(Score(reward, {"exact_match": reward}, {}) for reward in rewards))


def leave_run(directory: Path, num_steps: int = 12, rate: float = 0.2) -> Path:
    """A run of so many steps."""
    config = RunConfig()
    config.model.path, config.optimizer.lr, config.trainer.output_dir = "/no/model", rate, str(directory)
    config.logging.progress = False
    log = RunLog()
    directory.mkdir(parents=True)
    with log.opened(directory / run_log.FILE, 0, 1):
        save_resolved(config, directory / "config.yaml")
        observer = Observer.create(config.logging, directory, True, 0, num_steps, {"optimizer": {"lr": rate}})
        with observer:
            sample = ShownSample("3+4=", HOSTILE, "7", 0.0, 5, "stop")
            for step in range(1, num_steps + 1):
                observer.samples(step, "rollout", [sample])
                observer.distribution(step, "response_lengths", [3.0, 4.0, 9.0])
                observer.log(step, metrics_of(step, rate))
        logging.getLogger("engine").warning("slow, said %s", HOSTILE)
        log.say("checkpoint: here")
    rows = [row for number, text in enumerate((HOSTILE, "7 é")) for row in to_rows(group(number, text, (0.0, 1.0)))]
    write_step(directory / "rollouts", num_steps, [{"step": num_steps, "outcome": "learnt", **row} for row in rows], 1)
    (directory / "environment.txt").write_text(f"torch 2 {HOSTILE}\n", encoding="utf-8")
    (directory / "huggingface").mkdir()
    bytes_tokenizer().save(str(directory / "huggingface" / "tokenizer.json"))
    return directory
