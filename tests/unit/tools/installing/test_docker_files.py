"""The container files agree with each other, with setup.py and with the devices of the machines that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[4]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NUM_DEVICES = {"npu-910b": 8, "npu-910c": 16}
CONTROL = ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
DRIVER = {
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/usr/local/Ascend/driver/tools/hccn_tool",
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
}


def environment(file: str) -> dict[str, str]:
    lines = [line for line in (DOCKER / file).read_text().splitlines() if line and not line.startswith("#")]
    assert all("=" in line for line in lines), file
    return dict(line.split("=", 1) for line in lines)


def text_of(value: Any) -> str:
    return yaml.safe_dump(value)


def required(extra: str, package: str) -> Requirement:
    """The version range of a package in setup.py."""
    setup = (ROOT / "setup.py").read_text()
    section = setup if not extra else re.search(rf'"{extra}": \[(.+?)\]', setup, re.DOTALL)[1]  # type: ignore[index]
    found = re.search(rf'"({re.escape(package)}[=<>][^"]*)"', section)
    assert found, f"setup.py names no {package}"
    return Requirement(found[1])


def test_there_is_a_service_for_every_kind_of_machine() -> None:
    assert set(SERVICES) == {"npu-910b", "npu-910c", "cuda", "cpu"}
    readme = (DOCKER / "README.md").read_text()
    for name in SERVICES:
        assert f"`{name}`" in readme
    for name, service in SERVICES.items():
        assert service["network_mode"] == "host" and service["shm_size"].endswith("gb"), name


@pytest.mark.parametrize("name", NUM_DEVICES)
def test_an_ascend_service_has_the_devices_and_the_driver_of_its_machine(name: str) -> None:
    service = SERVICES[name]
    assert service["devices"] == [f"/dev/davinci{i}" for i in range(NUM_DEVICES[name])] + CONTROL
    driver = [volume for volume in service["volumes"] if isinstance(volume, dict)]
    assert {volume["source"] for volume in driver} == DRIVER
    for volume in driver:
        assert volume["target"] == volume["source"] and volume["read_only"] and volume["type"] == "bind"
        assert volume["bind"] == {"create_host_path": False}
    assert service["env_file"] == "npu.env"


@pytest.mark.parametrize("name", SERVICES)
def test_models_data_and_runs_are_the_hosts(name: str) -> None:
    volumes = [volume for volume in SERVICES[name]["volumes"] if isinstance(volume, str)]
    inside = SERVICES[name]["working_dir"]
    assert volumes == [f"${{{part.upper()}_DIR}}:{inside}/{part}" for part in ("models", "data", "runs")]


def test_every_variable_is_defined_and_used() -> None:
    used = set(re.findall(r"\$\{?(\w+)", text_of(COMPOSE)))
    assert used == set(environment(".env"))
    assert all(not name.startswith("$") for name in environment("npu.env"))


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_builds_a_target_with_arguments_that_it_has(name: str) -> None:
    build = SERVICES[name]["build"]
    dockerfile = DOCKER / build["context"] / build["dockerfile"]
    stages = re.split(r"^FROM ", dockerfile.read_text(), flags=re.MULTILINE)
    stage = next(stage for stage in stages if stage.splitlines()[0].endswith(f" AS {build['target']}"))
    declared = set(re.findall(r"^ARG (\w+)", stages[0] + stage, re.MULTILINE))
    assert set(build.get("args", {})) <= declared
    assert (dockerfile.parent / f"{dockerfile.name}.dockerignore").is_file()


def base_image(name: str) -> tuple[str, str]:
    """(image, tag) as .env completes it; the CPU's stands in the Dockerfile."""
    build = SERVICES[name]["build"]
    image = build["args"].get("BASE_IMAGE") or "python:3.11-slim"
    image = re.sub(r"\$\{(\w+)\}", lambda match: environment(".env")[match[1]], image)
    repository, _, tag = image.rpartition(":")
    return repository, tag


@pytest.mark.parametrize("name", SERVICES)
def test_base_images_have_the_versions_of_setup_py(name: str) -> None:
    repository, tag = base_image(name)
    dockerfile = (DOCKER / "Dockerfile").read_text()
    assert tag and "latest" not in tag
    if name.startswith("npu"):
        assert repository == "quay.io/ascend/vllm-ascend"
        version, *kind = tag.removeprefix("v").split("-")
        assert version in required("npu", "vllm-ascend").specifier and version in required("npu", "vllm").specifier
        assert kind == (["a3"] if name == "npu-910c" else [])
    elif name == "cuda":
        assert repository == "vllm/vllm-openai"
        assert tag.removeprefix("v") in required("cuda", "vllm").specifier
    else:
        assert f"FROM {repository}:{tag}${{PYTHON_DIGEST}} AS cpu" in dockerfile
    assert f"`{repository}:{tag}`" in (DOCKER / "README.md").read_text()


def test_the_default_base_and_megatron_are_those_of_the_project() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    assert f"ARG BASE_IMAGE={':'.join(base_image('npu-910b'))}\n" in dockerfile
    megatron = re.search(r"^ARG MEGATRON_CORE=(\S+)$", dockerfile, re.MULTILINE)
    assert megatron and megatron[1] in required("", "megatron-core").specifier


def test_the_dockerfile_installs_what_mega_rl_runs_with() -> None:
    """Every runtime requirement is either the base image's or installed, with setup.py's range."""
    setup = (ROOT / "setup.py").read_text()
    runtime = re.search(r"^RUNTIME = \[(.+?)^\]", setup, re.DOTALL | re.MULTILINE)
    assert runtime is not None
    of_the_base = {"torch", "transformers", "tokenizers", "numpy", "megatron-core"}
    dockerfile = (DOCKER / "Dockerfile").read_text()
    for line in re.findall(r'"([^"]+)"', runtime[1]):
        requirement = Requirement(line)
        if requirement.name not in of_the_base:
            name = re.escape(requirement.name)
            found = re.search(rf"['\s]({name}(?:[<>=][^'\s]*)?)['\s]", dockerfile)
            assert found, f"the Dockerfile does not install {requirement.name}"
            assert requirement.specifier == Requirement(found[1]).specifier, requirement.name


def test_what_is_fetched_can_be_pinned() -> None:
    """Every base image takes a digest, MindSpeed is a commit, and what the locks name has hashes."""
    for name, service in SERVICES.items():
        assert re.search(r"\$\{\w+_DIGEST\}$", service["build"]["args"].get("BASE_IMAGE", "${PYTHON_DIGEST}")), name
    assert re.search(r"^MINDSPEED=[0-9a-f]{40}$", (DOCKER / ".env").read_text(), re.MULTILINE)
    assert "--branch" not in (DOCKER / "Dockerfile").read_text()
    for lock in (ROOT / "requirements").glob("*.lock"):
        requirements = re.split(r"^(?=\w)", lock.read_text(), flags=re.MULTILINE)[1:]
        assert requirements, lock.name
        for requirement in requirements:
            assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+\n", requirement), requirement
    bootstrap = (ROOT / "tools" / "bootstrap.sh").read_text()
    exceptions = ("--target", "--no-build-isolation")  # the emulation's wheel, and mega_rl itself
    for line in re.findall(r".*pip install.*", bootstrap):
        assert "--require-hashes" in line or any(exception in line for exception in exceptions), line
