"""The trainer as the policy that sampled: the noisy norms of one sync, for ``aqn.old_logprobs: recompute_noisy``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mega_rl.bridge.mapping.tensors import hf_tensors, roles
from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.bridge.slices import whole_box
from mega_rl.errors import InputError
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.parallel.collectives import gather_objects
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.weights.weight_sync import Pushed


@contextmanager
def behaviour_policy(actor: MegatronEngine, noise: AqnNoise, pushed: Pushed) -> Iterator[None]:
    """The actor with the norms that its engines got in a sync, the very same values; collective.

    Does nothing if ``aqn.old_logprobs`` is not ``recompute_noisy``, or the sync had no noise. The optimizer must not
    have stepped since the sync.

    Raises:
        InputError: the model's weights are float32, and therefore their own masters.
    """
    policy = actor.policy
    if not pushed.sigma or noise.config.old_logprobs != "recompute_noisy":
        yield
        return
    sync, shapes = noise.for_sync(pushed.version, pushed.sigma), hf_tensors(policy.shape)
    noisy = {
        name: sync.apply(name, master, shapes[name], whole_box(shapes[name]), policy.spec.dtype)
        for name, master in actor.master_weights(noise.targets(roles(policy.shape))).items()
    }
    with policy.replaced(noisy):
        yield


def noise_of(job: SamplingJob, total: int) -> AqnNoise:
    aqn = AqnNoise(job.config.aqn, total)
    if any(other != job.config.aqn for other in gather_objects(job.config.aqn)):
        raise InputError("the ranks were started with different aqn sections: give every one the same configuration")
    if job.config.aqn.enabled:
        aqn.targets(roles(job.shape))  # refuses what matches nothing
    return aqn
