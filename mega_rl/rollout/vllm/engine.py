"""vLLM inside the trainer's own processes.

vLLM is imported when an engine is constructed: its environment variables must be set before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mega_rl.bridge.mapping.vllm_slots import Slots
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import read_model_shape
from mega_rl.observe.heartbeat import HEART
from mega_rl.rollout.engine import Request
from mega_rl.rollout.requests import check_length, joined, resumed, text_of, trajectory_of_output, with_tail
from mega_rl.rollout.temperature_probe import NUM_LOGPROBS
from mega_rl.rollout.vllm.sleeping_memory import WEIGHTS
from mega_rl.rollout.vllm.start.construction import construct
from mega_rl.rollout.vllm.start.cpu_adjustments import plain_weights
from mega_rl.rollout.vllm.start.environment import (
    EngineGenerators,
    preserved_generators,
    set_batch_invariance,
    set_environment,
)
from mega_rl.rollout.vllm.start.options import LOGPROBS_MODE
from mega_rl.rollout.vllm.start.seeing import PromptRenderer, Sight, check_tokens
from mega_rl.rollout.vllm.start.versions import external_name, leave_routing_to_first_rank, taken_out
from mega_rl.rollout.vllm.weight_changes import WeightChanges
from mega_rl.types import Trajectory

PROBE = "probe"  # a request's name, where those of responses are numbers
CACHE = "kv_cache"  # vLLM's tag of memory that sleeps beside the weights


class VLLMEngine:
    """A ``Sampler`` and a ``ColocatedEngine`` for weight sinks: vLLM in process.

    ``rollout.tensor_parallel_size`` consecutive ranks are one engine.

    Construction is collective: every rank of the default group constructs, after the trainer's groups exist.

    Raises:
        InputError: options of ``rollout`` that vLLM does not know or does not accept.
    """

    def __init__(
        self,
        model_path: str | Path,
        rollout: RolloutConfig,
        *,
        max_model_len: int,
        device_type: str,
        dtype: str,
        slots: Slots | None = None,
        sight: Sight | None = None,
    ) -> None:
        """
        Args:
            model_path: Hugging Face directory with tokenizer and starting weights.
            max_model_len: longest prompt and response together, tokens.
            device_type: torch's name of the platform's device.
            dtype: of the model; used if ``rollout.dtype`` is not set.
            slots: for the adapter that every request takes, which adds nothing until it is written to; None: no slots.
            sight: for prompts with pictures; None: there are none.
        """
        set_environment(device_type)
        if rollout.batch_invariant:
            set_batch_invariance(device_type)
        self._rollout = rollout
        self._is_live = rollout.weight_update != "reload"
        self._max_model_len = max_model_len
        self._device_type = device_type
        self._generators = EngineGenerators(device_type, is_seeded=rollout.seeds == "engine")
        self._version = 0
        self._under_way: dict[int, Request] = {}  # by number of submission
        self._num_submitted = 0
        self._beside: list[tuple[int, Trajectory]] = []  # with their numbers: responses that ended beside a probe
        self._loaded: set[str] | None = None  # names loaded by the update under way; None outside of one
        self._llm = construct(str(model_path), rollout, max_model_len, device_type, dtype, slots, sight)
        self._changes = WeightChanges(self._llm, keeps_cache=rollout.kv_on_update == "keep")
        self._rendered = PromptRenderer(self._llm, sight)
        self._sees = sight is not None
        self._call("receiver_set_up", LOGPROBS_MODE)
        self._adapter = None if slots is None else self._call("receiver_open_slots", slots)  # that requests take
        self._names = frozenset(self._call("receiver_parameters"))
        self._mixture = _mixture_to_replay(model_path, rollout)
        if self._mixture is not None and device_type == "cpu":
            self._call("receiver_capture_routing")
        elif self._mixture is not None:
            leave_routing_to_first_rank(self._llm)
        self._can_sleep = bool(self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode)
        self._asleep: set[str] = set()  # the tags of the memory that is not there: vLLM itself would write into it

    @property
    def weight_version(self) -> int:
        return self._version

    def check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            check_length(request, self._max_model_len)

    @property
    def num_slots(self) -> int:
        """Responses that are sampled at a time; further ones wait."""
        return int(self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)

    @property
    def num_unfinished(self) -> int:
        return len(self._under_way) + len(self._beside)

    def submit(self, requests: Sequence[Request]) -> None:
        self.enter(requests)

    def enter(self, requests: Sequence[Request]) -> list[int]:
        """``submit``; returns the requests' numbers, which ``numbered_step`` gives back with their responses."""
        assert self._loaded is None, "generation inside a weight update"
        assert not self._asleep, f"generation while {sorted(self._asleep)} of the engine sleep"
        self.check(requests)
        first = self._num_submitted + 1
        if requests and not self._under_way:
            self._generators.seed(resumed(requests[0]).seed)
        with self._generators.in_use():
            for request in requests:
                self._num_submitted += 1
                self._under_way[self._num_submitted] = request
                asked = resumed(request)
                given = self._changes.salted(self._num_submitted, self._rendered(asked.prompt))
                self._add(self._num_submitted, given)
        self._rest_if_idle()  # if there were none
        return list(range(first, self._num_submitted + 1))

    def _add(self, number: int, given: dict[str, Any]) -> None:
        params = self._sampling_params(resumed(self._under_way[number]))
        self._llm.llm_engine.add_request(str(number), given, params, lora_request=self._adapter)

    def step(self) -> list[Trajectory]:
        return [trajectory for _, trajectory in self.numbered_step()]

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        assert not self._under_way, "generation while other responses are under way"
        self.submit(requests)
        done: list[tuple[int, Trajectory]] = []
        while self._under_way:
            done += self.numbered_step()
        return [trajectory for _, trajectory in sorted(done, key=itemgetter(0))]

    def numbered_step(self) -> list[tuple[int, Trajectory]]:
        """The responses that one step of the engine ends, with their numbers of submission, ascending."""
        beside, self._beside = self._beside, []
        if not self._under_way:
            return beside
        with self._generators.in_use():
            outputs = self._llm.llm_engine.step()
        HEART.mark()
        finished = {int(output.request_id): output for output in outputs if output.finished}
        return sorted(beside + self._ended(finished), key=itemgetter(0))

    def _ended(self, finished: Mapping[int, Any]) -> list[tuple[int, Trajectory]]:
        """What vLLM has ended, by number of submission, as trajectories."""
        found = [(number, self._trajectory(number, finished[number])) for number in sorted(finished)]
        self._rest_if_idle()
        return found

    def _rest_if_idle(self) -> None:
        """To be called when something may have been the last that was under way."""
        if not self._under_way:
            self._generators.give_back()

    def interrupt(self) -> tuple[list[Trajectory], list[Request]]:
        """As of ``ResumingSampler``."""
        assert not self._changes.num_mixed, "the weights of responses that are taken out have changed under way"
        with self._generators.in_use():  # what is computed ahead draws too
            outputs = {int(output.request_id): output for output in taken_out(self._llm)}
        requests = [
            with_tail(request, outputs[number], self._version, self._decode)
            for number, request in self._under_way.items()
        ]
        self._under_way.clear()
        self._changes.forget()
        self._rest_if_idle()
        beside, self._beside = self._beside, []
        return [trajectory for _, trajectory in beside], requests

    def _trajectory(self, number: int, output: Any) -> Trajectory:
        request = self._under_way.pop(number)
        asked = resumed(request)
        check_tokens(asked.prompt, output)
        (answer,) = output.outputs
        if request.tail is None and not self._is_text_followed(request):
            prompt_ids = asked.prompt.token_ids
            answer.text = text_of([*prompt_ids, *answer.token_ids], len(prompt_ids), answer.finish_reason, self._decode)
        experts = self._routed_experts(number, asked, output) if asked.with_routing else None
        trajectory = trajectory_of_output(asked, output, self._version, experts)
        return joined(request.tail, self._changes.told(number, trajectory), self._decode)

    def _routed_experts(
        self, number: int, request: Request, output: Any
    ) -> npt.NDArray[np.unsignedinteger[Any]] | None:
        """[tokens but the last, M, K] as ``Trajectory`` has them; None on a rank that is not the engine's first."""
        assert self._mixture is not None, "routing of an engine that was not started for it"
        (answer,) = output.outputs
        dtype = np.uint8 if self._mixture.expert_bytes == 1 else np.uint16
        if self._device_type == "cpu":
            num_tokens = len(request.prompt.token_ids) + len(answer.token_ids) - 1
            return self._call("receiver_routed_experts", str(number), num_tokens).astype(dtype)
        routed = answer.routed_experts  # of all layers, those without experts too
        return None if routed is None else routed[:, sorted(self._mixture.layers)].astype(dtype)

    def first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        """As ``temperature_probe.Probed``, of this one engine; its ranks make the same calls.

        Responses that are under way go on meanwhile; those that end are returned by the next step.
        """
        assert self._loaded is None, "a probe inside an update"
        prompt = {"type": "token", "prompt_token_ids": list(prompt_ids)[: self._max_model_len - 1]}
        num_logprobs = min(NUM_LOGPROBS, self._llm.llm_engine.vllm_config.model_config.get_vocab_size())
        finished: dict[int, Any] = {}  # beside it
        answer: Any = None
        with preserved_generators(self._device_type):
            params = _probe_params(temperature, num_logprobs)
            adapter = self._adapter if with_adapter else None
            self._llm.llm_engine.add_request(PROBE, prompt, params, lora_request=adapter)
            while answer is None:
                for output in self._llm.llm_engine.step():
                    if output.finished and external_name(output.request_id) == PROBE:
                        (answer,) = output.outputs
                    elif output.finished:
                        finished[int(output.request_id)] = output
        if finished:
            self._beside += self._ended(finished)
        (row,) = answer.logprobs
        return [{token: entry.logprob for token, entry in row.items()}]

    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's live parameters by the engine's own (fused) names: writing into them changes the engine.

        Raises:
            InputError: the engine keeps its weights packed (``rollout.weight_update=reload``).
        """
        if not self._is_live:
            raise InputError(
                "rollout.weight_update=reload keeps the engine's weights packed: set rollout.weight_update=live to "
                "read or write them in place."
            )
        return self._call("receiver_parameters")

    def use_loader(self) -> None:
        """From here on work as with ``rollout.weight_update=reload``: take whole tensors, have no ``parameters``."""
        assert self._loaded is None, "another way inside a weight update"
        self._is_live = False

    def _as_constructed(self) -> AbstractContextManager[None]:
        """Wraps the loading of weights: they are packed, or not, as at construction."""
        return plain_weights(self._rollout.weight_update != "reload") if self._device_type == "cpu" else nullcontext()

    def begin_update(self) -> None:
        assert self._loaded is None, "a weight update inside another"
        assert not self._under_way, "a weight update while responses are under way"
        assert WEIGHTS not in self._asleep, "a weight update while the engine's weights sleep"
        self._loaded = set()
        self._call("receiver_begin_update")
        if not self._is_live:
            self._call("receiver_begin_reload")

    def load_hf_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load full Hugging Face tensors by name; any number of times within one update.

        Once ``use_loader`` was called, or with ``rollout.weight_update=reload``, a tensor may be read as late as in
        ``finish_update``: its memory must not be reused before.
        """
        assert self._loaded is not None, "weights outside of an update"
        with self._as_constructed():
            self._loaded |= self._call("receiver_load", weights)

    def finish_update(self, version: int) -> None:
        """Use the new weights as ``version``: pack what must be packed, forget every cached prefix.

        Raises:
            RuntimeError: the reload left weights out, or cached prefixes could not be forgotten.
        """
        assert self._loaded is not None, "the end of an update that has not begun"
        loaded, self._loaded = self._loaded, None
        if not self._is_live:
            with self._as_constructed():
                self._call("receiver_finish_reload")
            if missing := sorted(self._names - loaded):
                raise RuntimeError(
                    f"The reload to version {version} left out {len(missing)} weights of the engine, the first is "
                    f"{missing[0]}."
                )
        self._forget_pictures()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(f"The engine kept prefixes computed before weight version {version}.")
        self._version = version

    def exchange(self, write: Callable[[Mapping[str, torch.Tensor]], None], version: int) -> None:
        """Have ``write`` put the weights of ``version`` into the live parameters, between two steps.

        Requests may be under way: they go on with the new weights, and their trajectories tell which tokens came of
        which version. Keys and values of what they have so far are computed anew, or kept (``rollout.kv_on_update``).

        Raises:
            InputError: as ``parameters``.
            RuntimeError: cached prefixes could not be forgotten.
        """
        assert self._loaded is None, "weights inside a weight update"
        assert not self._asleep, "new weights for responses under way in an engine that sleeps"
        self._call("receiver_begin_update")
        write(self.parameters())
        self._forget_pictures()
        for number, given in self._changes.make(version, self._version, self._under_way).items():
            self._add(number, given)
        self._version = version

    def _forget_pictures(self) -> None:
        """What a vision tower has made of pictures may come of weights that have changed."""
        if self._sees:
            self._llm.llm_engine.reset_encoder_cache()

    def sleep(self, rewritten: Collection[str] = ()) -> None:
        """Move the weights to host memory and drop the cache of keys and values, and what is rewritten.

        Level 2, which would drop all of the weights, is not used: vllm-ascend 0.23 keeps rotary tables in the same
        memory pool but not among the model's buffers, and only buffers would come back.
        """
        if self._can_sleep:
            with self._call("receiver_dropped", rewritten) if rewritten else nullcontext():
                self._llm.sleep(level=1)
            self._asleep = {WEIGHTS, CACHE}

    def wake_weights(self) -> None:
        self._wake(WEIGHTS)

    def wake_cache(self) -> None:
        self._wake(CACHE)

    def _wake(self, tag: str) -> None:
        if self._can_sleep:
            self._llm.wake_up(tags=[tag])
            self._asleep.discard(tag)

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of ``WeightReceiver`` in this rank's worker; it lives here, so tensors pass by reference."""
        (result,) = self._llm.collective_rpc(method, args=args)
        return result

    def _decode(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._llm.get_tokenizer()
        return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _is_text_followed(self, request: Request) -> bool:
        """Whether vLLM makes text of every token, between two steps of the device; else it is made once, at the end."""
        return bool(self._rollout.stop or request.stop)

    def _sampling_params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            output_kind=RequestOutputKind.FINAL_ONLY,  # else every step would return the whole response so far
            temperature=request.temperature,
            seed=None if self._rollout.seeds == "engine" else request.seed,
            max_tokens=request.max_tokens,
            stop=[*self._rollout.stop, *request.stop] or None,
            detokenize=self._is_text_followed(request),
            stop_token_ids=list(self._rollout.stop_token_ids) or None,
            ignore_eos=self._rollout.ignore_eos,
            logprobs=0 if request.with_logprobs else None,  # only the sampled token's
            flat_logprobs=True,  # numbers in one list, not a dictionary and an object of each token
        )


def _probe_params(temperature: float, num_logprobs: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        output_kind=RequestOutputKind.FINAL_ONLY,
        temperature=temperature,
        seed=0,
        max_tokens=1,
        ignore_eos=True,
        logprobs=num_logprobs,
    )


def _mixture_to_replay(model_path: str | Path, rollout: RolloutConfig) -> Mixture | None:
    """The experts whose choice trajectories may bring; None if the configuration does not ask for it."""
    return read_model_shape(model_path).mixture if rollout.routing_replay == "rollout" else None
