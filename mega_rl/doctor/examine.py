"""All checks in their order, and the table's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mega_rl.doctor import devices, machine, software, trials, variables
from mega_rl.doctor.finding import CPU, CUDA, NPU, Check, CheckAnswer, Finding, Wanted, fail, skip
from mega_rl.doctor.host import Host

CHECKS: tuple[Check, ...] = (
    *software.CHECKS,
    *devices.CHECKS,
    *variables.CHECKS,
    *machine.CHECKS,
    *trials.CHECKS,
)


def likely_platform(host: Host) -> str:
    """What the machine is meant to be, as far as it shows: also if that platform does not work yet."""
    if host.glob("/dev/davinci*") or "torch-npu" in host.packages or host.glob("/usr/local/Ascend"):
        return NPU
    return CUDA if host.glob("/dev/nvidia[0-9]*") else CPU


def examine(host: Host, wanted: Wanted, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """Every check in turn, at least one finding each; one that raises becomes a finding itself."""
    for check in checks:
        for answer in _answers(check, host, wanted):
            yield Finding(check.area, check.name, answer.state, answer.found, answer.fix)


def _answers(check: Check, host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    if wanted.platform not in check.platforms:
        yield skip(f"not on the {wanted.platform} platform")
    elif wanted.quick and check.area == "trials":
        yield skip("left out by --quick")
    else:
        try:
            yield from check.examine(host, wanted)
        except Exception as error:  # noqa: BLE001 - a broken machine breaks checks in ways that nobody listed
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            yield fail(f"the check itself failed: {what}", "report it, with the output of tools/check_env.py --json")


def verdict(findings: Sequence[Finding]) -> str:
    """The worst state: "fail", "warn" or "ok"."""
    states = {finding.state for finding in findings}
    return next((state for state in ("fail", "warn") if state in states), "ok")
