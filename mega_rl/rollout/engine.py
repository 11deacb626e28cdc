"""What a rollout engine must do, and the request that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mega_rl.types import Prompt, Trajectory


@dataclass(frozen=True)
class Request:
    """One response to sample.

    Example: ``Request(prompt, sample_index=0, seed=sample_seed(0, 3, prompt.index, 0), max_tokens=256)``
    """

    prompt: Prompt
    sample_index: int  # 0 .. G-1 within the prompt's group
    seed: int  # of this response alone, in [0, 2**63); unused where greedy
    max_tokens: int  # of the response, >= 1
    temperature: float = 1.0  # 0: greedy

    def __post_init__(self) -> None:
        assert self.max_tokens >= 1 and self.temperature >= 0.0 and 0 <= self.seed < 2**63, self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class RolloutEngine(Protocol):
    """One engine, or this rank's tensor-parallel part of one: then its ranks make the same calls in the same order.

    A weight update is ``begin_update``, then writing into ``parameters()`` in place or any number of
    ``load_hf_weights``, then ``finish_update``.
    """

    @property
    def weight_version(self) -> int:
        """The version given to the latest ``finish_update``; 0 for the weights that the engine started with."""

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        """One trajectory per request, in the order of the requests; no requests give an empty list.

        Raises:
            InputError: a prompt that leaves no room for its response within the engine's length.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        """Start sampling these beside whatever is under way; ``step`` gives what they come to.

        Raises:
            InputError: a prompt that leaves no room for its response within the engine's length.
        """

    def step(self) -> list[Trajectory]:
        """Sample on, a token or so per response; returns the responses that this ended, in the order of submission.

        Which call ends a response may depend on the engine; what the response is does not.
        """

    @property
    def num_unfinished(self) -> int:
        """Submitted requests whose trajectory ``step`` has not yet returned."""

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse requests that ``submit`` would refuse, without any collective.

        Raises:
            InputError: a prompt that leaves no room for its response within the engine's length.
        """

    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's live parameters by the engine's own (fused) names: writing into them changes the engine.

        Raises:
            InputError: the engine keeps its weights packed (``rollout.weight_update=reload``).
        """

    def begin_update(self) -> None:
        """Make ready for new weights."""

    def load_hf_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load full Hugging Face tensors by name through the engine's own loader.

        With ``rollout.weight_update=reload`` a tensor may be read as late as in ``finish_update``: its memory must not
        be reused before.
        """

    def finish_update(self, version: int) -> None:
        """Put the new weights to work as ``version``: pack what must be packed, forget every cached prefix.

        Raises:
            RuntimeError: a reload that left weights out.
        """

    def sleep(self) -> None:
        """Give device memory back until ``wake_up``; does nothing where the platform cannot."""

    def wake_up(self) -> None:
        """Take the memory again."""
