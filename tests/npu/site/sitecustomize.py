"""Every Python process on pretended devices begins with this, Ray's workers too: its folder is on their path."""

from tests.npu import imports

imports.install()
