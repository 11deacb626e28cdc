"""A limit on what a chat template may do: it comes with a model, and its loops need not end.

Jinja's sandbox, in which transformers runs templates, bounds one ``range`` and keeps a template from Python's objects.
Loops inside loops are bounded here, by the lines of the template that are run. What one line builds is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

MAX_TEMPLATE_STEPS = 2_000_000  # a conversation of a thousand messages takes some ten thousand
_FILE = "<template>"  # what jinja calls the code of a template that came as text


class TooManySteps(Exception):
    """A template was stopped."""


@contextmanager
def bounded_template() -> Iterator[None]:
    """Wraps the rendering of one template in this thread.

    Raises:
        TooManySteps: out of the template.
    """
    num_steps = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > MAX_TEMPLATE_STEPS:
            raise TooManySteps
        return count

    def of_templates(frame: FrameType, event: str, argument: Any) -> Any:
        return count if frame.f_code.co_filename == _FILE else None

    before = sys.gettrace()
    sys.settrace(of_templates)
    try:
        yield
    finally:
        sys.settrace(before)
