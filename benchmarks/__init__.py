"""Measurements, each a program that runs in the root of the repository: ``python -m benchmarks.ROOM.NAME --help``.

- ``training``: a step, its log-probabilities, optimizer, adapters and memory
- ``against_trl``: steps of TRL's trainers beside ours
- ``sampling``: evaluation, episodes, rewards, the sandbox
- ``asynchronous``: sampling beside training
- ``weights``: their sync, store, conversion and checkpoints
- ``overhead``: what a step costs besides computing
- ``gpu``: all that needs an accelerator, started by ``benchmarks/gpu/run.sh``

docs/benchmarks.md has the figures. Runs to which faults happen are in ``tests/faults``.
"""
