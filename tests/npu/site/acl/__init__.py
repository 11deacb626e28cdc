"""Stands for pyACL, CANN's interface for Python: vllm-ascend copies sleeping weights with it, Ray asks for devices."""

from acl import rt as rt


def get_soc_name() -> str:
    """Stands for the chip's name, as a 910B gives it."""
    return "Ascend910B1"
