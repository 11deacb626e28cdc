"""The error that a user can fix; it stands alone so that no reader of a configuration has to import torch."""

from __future__ import annotations


class InputError(ValueError):
    """Something that a user can fix: one sentence that names the field or the file, and what to do."""
