"""Serve a model to agents: ``python tools/serve.py MODEL [options] [key=value ...]``, an OpenAI-compatible endpoint.

MODEL is a Hugging Face directory, the id of a model in a local cache, a checkpoint of ours, or the directory of a run,
whose configuration then gives lengths, stops and temperature. Listens on loopback unless told otherwise; on any other
address keys are needed: put one or several, with spaces between them, into MEGA_RL_SERVE_KEYS. With --record DIR the
conversations of sessions become rollouts that a run can read. See docs/serve.md.

Examples:
  python tools/serve.py Qwen/Qwen3-8B --tool-parser hermes --max-model-len 16384
  python tools/serve.py runs/a --record runs/agents --step 1 --history keep

Exit status 0: ended by a signal, 2: input that a user can fix, 1: anything else.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import uvicorn

from mega_rl import platform
from mega_rl.config import RunConfig, validate
from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.data.tokens.tokenizer import load_tokenizer
from mega_rl.errors import InputError
from mega_rl.evaluation.configuration import evaluation_config
from mega_rl.evaluation.exporting import export
from mega_rl.evaluation.weights import EvaluatedWeights, find_weights
from mega_rl.models.shape import read_model_shape
from mega_rl.observe.lines import write_whole_lines
from mega_rl.parallel.watch.process import end_with_torchrun, fail, join
from mega_rl.rewards.sandbox.scratch import Scratch, sweep
from mega_rl.rollout.engine import Sampler
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.remote.member import FleetMember
from mega_rl.rollout.remote.placement import EngineGroup
from mega_rl.rollout.vllm.streaming_engine import StreamingEngine
from mega_rl.rollout.vllm.tool_parsers import check_parser, tool_parser
from mega_rl.serving.conversations import ConversationRenderer
from mega_rl.serving.endpoint import Endpoint, Model
from mega_rl.serving.engines import Engines
from mega_rl.serving.sessions import Recorder, Sessions
from mega_rl.serving.web import LOOPBACK, application

KEYS = "MEGA_RL_SERVE_KEYS"
MIN_KEY = 16  # characters
SCRATCH = "mega_rl_serve_"  # how the name of a directory for exported weights begins
MEMORY_SHARE = 0.9  # of a device's memory, which the engine has for itself
TOOLS = Path(__file__).resolve().parent


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model directory or id, checkpoint, or directory of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as rollout.temperature=0.8")
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        help="repeatable; default: that of the run the model is from",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    parser.add_argument("--name", help="of the model, as clients see it (default: that of its directory)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="prompt and response (default: the run's)")
    parser.add_argument("--max-requests", type=int, default=256, metavar="N", help="responses at once, by engine")
    parser.add_argument("--tool-parser", metavar="NAME", help="vLLM's parser of the calls that the model writes")
    parser.add_argument("--record", type=Path, metavar="DIR", help="record sessions as rollouts in this directory")
    parser.add_argument(
        "--step", type=int, default=1, metavar="N", help="of the training that they are for (default 1)"
    )
    parser.add_argument("--history", choices=["refuse", "keep"], default="refuse", help="what to do with a template")
    parser.add_argument("--max-sessions", type=int, default=4096, metavar="N", help="open at once (default 4096)")
    parser.add_argument("--session-idle-s", type=float, default=3600, metavar="S", help="then one is dropped")
    parser.add_argument("--engines", type=int, metavar="N", help="as many engines, in processes of their own (Ray)")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices per engine (default 1)")
    parser.add_argument("--grace-s", type=float, default=30, metavar="S", help="for requests under way at the end")
    return parser.parse_intermixed_args(arguments)


def keys_of(options: argparse.Namespace) -> list[str]:
    """Raises InputError: the address can be reached from elsewhere and there is no key, or a key is weak."""
    keys = os.environ.pop(KEYS, "").split()  # no engine, and no process of one, inherits them
    if not keys and options.host not in LOOPBACK:
        raise InputError(f"--host {options.host} can be reached from elsewhere; put a key into {KEYS}")
    for key in keys:
        if len(key) < MIN_KEY or not (key.isascii() and key.isprintable()):
            raise InputError(f"a key in {KEYS} has {len(key)} characters; give at least {MIN_KEY}, all printable ASCII")
    return keys


def check(options: argparse.Namespace) -> None:
    """Raises InputError: impossible options."""
    for name in ("max_requests", "max_sessions", "step", "tensor_parallel", "engines"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; give at least 1")
    if options.max_model_len is not None and options.max_model_len < 2:
        raise InputError(f"--max-model-len is {options.max_model_len}; a prompt and a response take at least 2 tokens")
    for name in ("session_idle_s", "grace_s"):
        if not getattr(options, name) > 0:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(options, name)}; give more than 0")
    if options.tensor_parallel > 1 and options.engines is None:
        raise InputError(f"--tensor-parallel {options.tensor_parallel} needs processes of its own: give --engines 1")
    if options.tool_parser is not None:
        check_parser(options.tool_parser)


def configured(options: argparse.Namespace, weights: EvaluatedWeights) -> RunConfig:
    """What the engines are started with. Raises InputError: as ``load_config``."""
    config = evaluation_config(options.config or weights.run_config, options.overrides, weights)
    rollout = replace(
        config.rollout,
        tensor_parallel_size=options.tensor_parallel,
        placement="colocated" if options.engines is None else "separate",
        num_engines=options.engines or 1,
        seeds="request",
    )
    length = options.max_model_len or config.data.max_prompt_length + config.data.max_response_length
    trainer = replace(config.trainer, max_tokens_per_microbatch=None)
    data = replace(config.data, max_prompt_length=length - 1, max_response_length=1)  # a client says how much of either
    rewards = config.rewards or [RewardConfig("boxed")]  # a configuration has some; nothing is scored here
    config = replace(config, rollout=rollout, trainer=trainer, data=data, rewards=rewards)
    validate(config, 1, has_files=False)
    rollout.weight_update = "reload"  # engines load for themselves, in the form that is fastest
    return config


def listener(options: argparse.Namespace) -> socket.socket:
    """The port, taken before anything heavy starts. Raises InputError."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise InputError(f"--host {options.host} --port {options.port} cannot be listened on: {error}") from error


def samplers(config: RunConfig, length: int) -> tuple[list[Sampler], Callable[[], None]]:
    """The engines, and what each one's thread has to do first."""
    here = platform.select(config.platform.name, platform.engine_role(config.rollout, config.platform.deterministic))
    device = join(config)
    if here.has_own_memory:
        config.rollout.vllm.setdefault("gpu_memory_utilization", MEMORY_SHARE)
        config.rollout.vllm.setdefault("enable_sleep_mode", False)
    num_threads = torch.get_num_threads()
    if config.rollout.placement == "separate":
        spec = EngineSpec(
            str(Path(config.model.path).resolve()),
            config.rollout,
            length,
            config.model.dtype,
            here.name,
            config.platform.deterministic,
            num_threads,
        )
        fleet = EngineGroup(spec, config.rollout.num_engines)
        return [FleetMember(fleet, number, length) for number in range(fleet.num_engines)], lambda: None
    engine = StreamingEngine(
        config.model.path, config.rollout, max_model_len=length, device_type=device.type, dtype=config.model.dtype
    )
    return [engine], partial(_bind, num_threads)


def _bind(num_threads: int) -> None:
    """Both belong to a thread: the device, and how many others help it."""
    platform.current().set_device(0)
    torch.set_num_threads(num_threads)


def endpoint_of(options: argparse.Namespace, config: RunConfig, scratch: Path, weights: EvaluatedWeights) -> Endpoint:
    """Everything behind the port; returns when the engines can sample. Raises InputError."""
    tokenizer = load_tokenizer(config.model.path)
    renderer, sessions = ConversationRenderer(tokenizer, config.rollout.stop_token_ids, options.history), None
    if options.record is not None:
        renderer.check()
        recorder = Recorder(options.record, options.step)
        sessions = Sessions(tokenizer, recorder, options.max_sessions, options.session_idle_s)
    if weights.is_checkpoint:
        export(weights, config.model.path, scratch / "model", TOOLS)
        config.model.path = str(scratch / "model")
    length = config.data.max_prompt_length + config.data.max_response_length
    vocab_size = read_model_shape(config.model.path).vocab_size
    engines, prepare = samplers(config, length)
    parse_calls = None if options.tool_parser is None else tool_parser(options.tool_parser, tokenizer)
    model = Model(options.name or weights.directory.resolve().name, length, vocab_size, config.rollout.temperature)
    return Endpoint(Engines(engines, options.max_requests, prepare), renderer, model, sessions, parse_calls)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    check(options)
    keys = keys_of(options)
    weights = find_weights(options.model)
    config = configured(options, weights)
    port = listener(options)
    sweep(SCRATCH)
    scratch = Scratch(SCRATCH)
    try:
        endpoint = endpoint_of(options, config, Path(scratch.path), weights)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # the server takes them while it runs, and raises them again
        serve(endpoint, keys, port, options.grace_s)
    finally:
        scratch.remove()
    sys.exit(0 if endpoint.engines.failure is None else 1)


def serve(endpoint: Endpoint, keys: Sequence[str], port: socket.socket, grace_s: float) -> None:
    """Until a signal comes; then requests under way may end within the grace."""
    settings = uvicorn.Config(
        application(endpoint, keys),
        loop="asyncio",
        http="h11",
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, int(grace_s)),
    )
    host, number = port.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {endpoint.model.name} at http://{shown}:{number}/v1", flush=True)
    uvicorn.Server(settings).run(sockets=[port])


if __name__ == "__main__":
    write_whole_lines()
    end_with_torchrun()
    try:
        main()
    except Exception as error:  # noqa: BLE001 - the last frame: whatever it is, the exit status says so
        fail(error)
