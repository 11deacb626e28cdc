"""mega_rl: reinforcement-learning post-training of large language models on Ascend NPUs, NVIDIA GPUs and CPUs."""

__version__ = "0.1.0"
