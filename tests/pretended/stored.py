"""Versions that a test puts into a weight store by itself."""

from __future__ import annotations

from itertools import count

from mega_rl.rollout.remote.weight_store import Store, StoredVersion

_STAMPS = count(2, 2)


def sealed(store: Store, version: int) -> StoredVersion:
    """What lies in the store's parameters as a version that is whole."""
    parameters = [store.parameters(worker, version) for worker in range(len(store.form.workers))]
    hashes = [
        (plan.fixed.hashes_of(of_worker, store.form.salt), plan.slot.hashes_of(of_worker, store.form.salt))
        for plan, of_worker in zip(store.form.plans, parameters, strict=True)
    ]
    return store.seal(version, next(_STAMPS), hashes)
