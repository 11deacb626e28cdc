"""Started by torchrun on 4 ranks: what noise and simulated quantisation send, and what they leave alone.

Prints one line ``CHECK <name> <rank> ok``, or what is wrong, per check and rank. Expected values come from the Hugging
Face tensors and a draw written here again, never from the code under test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tensors import hf_tensors, roles
from mega_rl.bridge.mapping.vllm import vllm_slices
from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.bridge.outgoing.quantize import quantize_dequantize
from mega_rl.bridge.slices import indices
from mega_rl.config.schema.sections import RunConfig
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.models.shape import read_model_shape
from mega_rl.observe.timers import Timers
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rollout.sinks import InPlaceSink, LoaderSink, SentWeights, colocated_layout
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.weights import behaviour, outgoing
from mega_rl.stages.weights.behaviour import behaviour_policy
from mega_rl.stages.weights.export import export_huggingface
from mega_rl.stages.weights.weight_sync import WeightSync
from mega_rl.types import DTYPES
from tests.distributed.rollout.rollout_checks import check, equals_hf, shared_directory, start
from tests.launching.training import digests
from tests.models import rollout_support, tiny_models
from tests.models.engine_support import build_engine, groups, loss_of, pack_for_rank, run_config
from tests.models.layouts import AQN_CASES as CASES, Case
from tests.models.parity_reference import OBJECTIVES, make_sequences

SEED, SIGMA = 1234, 0.05
BLOCKS = CASES[0]


class Collector:
    """Stands for an engine that loads whole Hugging Face tensors: keeps what it is sent."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.weight_version = 0

    def use_loader(self) -> None: ...
    def wake_weights(self) -> None: ...
    def wake_cache(self) -> None: ...
    def sleep(self) -> None: ...
    def begin_update(self) -> None:
        self.tensors = {}

    def load_hf_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in weights}

    def finish_update(self, version: int) -> None:
        self.weight_version = version


def new_sync(session: SamplingJob, engine: MegatronEngine, collector: Collector, noise: AqnNoise) -> WeightSync:
    config = session.config
    weights = SentWeights(session.shape, DTYPES[config.model.dtype], config.bridge.bucket_bytes, session.device)
    sink = LoaderSink(collector, weights, dist.get_world_size())  # type: ignore[arg-type]
    return outgoing.weight_sync(session, engine, sink, noise)


def new_session(config: RunConfig, layout: ParallelLayout, model_dir: Path, engine_size: int, out: Path) -> SamplingJob:
    config.rollout.tensor_parallel_size, device = engine_size, torch.device("cpu")
    shape, weights, writer = read_model_shape(model_dir), HFReader(model_dir), CheckpointWriter(out / "c", 0, False)
    config.model.path = str(model_dir)
    unused: Any = None
    return SamplingJob(
        config, device, layout, shape, weights, tokenizer=unused, output_dir=out, checkpoint=None, memory=None,
        checkpoints=writer, timers=Timers(), store=unused, profiling=unused, load=unused,
    )  # fmt: skip


def aqn_config(case: Case, dtype: str = "float32", four_bits: str | None = None) -> RunConfig:
    config = run_config(case, OBJECTIVES["rl"], dtype)
    config.aqn.enabled, config.rollout.weight_update = True, "reload"
    config.rollout.simulated_quantization = four_bits
    return config


def noise_of(name: str, size: int, version: int, sigma: float) -> torch.Tensor:
    """The specification's draw, written again."""
    digest = hashlib.blake2b(f"aqn-v1|{SEED}|{version}|{name}".encode(), digest_size=16).digest()
    generator = numpy.random.Generator(numpy.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.standard_normal((size,), dtype=numpy.float32) * numpy.float32(sigma))


def clean_tensors(model_dir: Path) -> dict[str, torch.Tensor]:
    shape, reader = read_model_shape(model_dir), HFReader(model_dir)
    return {name: reader.read(name, tuple((0, n) for n in size)) for name, size in hf_tensors(shape).items()}


def expected_tensors(
    clean: dict[str, torch.Tensor], version: int, sigma: float, four_bits: str | None, is_mixture: bool
) -> dict[str, torch.Tensor]:
    norms = ("input_layernorm.weight",) if is_mixture else ("input_layernorm.weight", "post_attention_layernorm.weight")
    sent = {}
    for name, tensor in clean.items():
        sent[name] = tensor
        if name.endswith(norms) and sigma:
            sent[name] = tensor + noise_of(name, tensor.numel(), version, sigma)
        elif "_proj.weight" in name and four_bits:
            sent[name] = quantize_dequantize(tensor, four_bits, float(tensor.abs().max()))
    return sent


def sha256(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(t.contiguous().view(torch.uint8).numpy()).hexdigest() for name, t in tensors.items()}


def state_of(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Copies of everything that training keeps: weights, masters and moments."""
    state = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    for part, optimizer in enumerate(getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])):
        parameters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
        state |= {f"{part}.master.{i}": p.detach().clone() for i, p in enumerate(parameters)}
        for i, p in enumerate(parameters):
            kept = optimizer.optimizer.state[p].items()
            state |= {f"{part}.{i}.{k}": v.clone() for k, v in kept if torch.is_tensor(v)}
    return state


def is_unchanged(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert not changed, changed[:3]


def stream_is_the_specified_one(case: Case, layout: ParallelLayout, family: str, root: Path) -> None:
    """Every hash of the stream is that of clean weights, plus exactly Z where noise goes, in four bits where asked."""
    model_dir, is_mixture = root / family, family == "qwen3_moe"
    clean = clean_tensors(model_dir)
    config = aqn_config(case, four_bits="nvfp4")
    config.aqn.num_stages, config.aqn.sigma_start, config.aqn.sigma_end = 2, SIGMA, SIGMA  # 0 in the first stage
    session = new_session(config, layout, model_dir, 1, root)
    engine = build_engine(config, layout, model_dir, 4)
    noise, collector = behaviour.noise_of(session, total=10), Collector()
    sync = new_sync(session, engine, collector, noise)
    before, generator_state = state_of(engine), torch.get_rng_state()
    pushed = sync.push(version=3)  # a stage without noise: four bits only
    assert sha256(collector.tensors) == sha256(expected_tensors(clean, 3, 0.0, "nvfp4", is_mixture))
    assert (pushed.version, pushed.sigma) == (3, 0.0) and not [name for name in pushed.metrics if "aqn" in name]
    pushed = sync.push(version=7)
    metrics = pushed.metrics
    assert (pushed.version, pushed.sigma) == (7, SIGMA)
    expected = expected_tensors(clean, 7, SIGMA, "nvfp4", is_mixture)
    assert sha256(collector.tensors) == sha256(expected), [
        n for n in expected if not torch.equal(expected[n], collector.tensors[n])
    ][:3]
    noisy = [name for name in expected if "layernorm" in name and not torch.equal(expected[name], clean[name])]
    assert len({sha256({"": expected[n] - clean[n]})[""] for n in noisy}) == len(noisy) == metrics["aqn/num_tensors"]
    assert len(noisy) == (4 if is_mixture else 8)
    hashes = gather_objects(metrics["aqn/noise_hash"])
    assert len(set(hashes)) == 1 and collector.weight_version == 7
    exact = sync.push(version=9, is_validation=True)
    assert (exact.version, exact.sigma) == (9, 0.0) and not [name for name in exact.metrics if "aqn" in name]
    assert sha256(collector.tensors) == sha256(clean)
    is_unchanged(before, state_of(engine))
    assert torch.equal(torch.get_rng_state(), generator_state)


def cut_blocks_are_refused(layout: ParallelLayout, root: Path) -> None:
    """down_proj has 96 columns, so a rank of two has one and a half blocks of 32."""
    config = aqn_config(BLOCKS, four_bits="mxfp4")
    session = new_session(config, layout, root / "qwen3", 1, root)
    engine = build_engine(config, layout, root / "qwen3", 4)
    try:
        new_sync(session, engine, Collector(), behaviour.noise_of(session, 10))
    except ValueError as error:
        assert "columns 0 to 48 of model.layers.0.mlp.down_proj" in str(error), error
    else:
        raise AssertionError("no error")


def train(root: Path, layout: ParallelLayout, is_noisy: bool) -> tuple[dict[str, str], list[list[float]]]:
    """Two bfloat16 steps, a checkpoint and an export in the middle of a stage; digests, and reference statistics."""
    out = root / ("noisy" if is_noisy else "clean")
    config = aqn_config(BLOCKS, "bfloat16")
    config.aqn.enabled, config.aqn.old_logprobs = is_noisy, "recompute_noisy"
    config.aqn.schedule = "constant"
    session = new_session(config, layout, root / "qwen3", 1, out)
    engine = build_engine(config, layout, root / "qwen3", 4)
    reference = MegatronPolicy(engine.policy.spec, session.shape, layout, session.device)
    reference.load_huggingface(session.weights)
    noise, sequences = AqnNoise(config.aqn, total_steps=10), make_sequences(OBJECTIVES["rl"], 250)
    sync = new_sync(session, engine, Collector(), noise) if is_noisy else None
    microbatches = pack_for_rank(BLOCKS, layout, sequences)
    for step in range(2):
        if sync is not None:
            pushed = sync.push(version=step)
            with behaviour_policy(engine, noise, pushed):
                engine.token_stats(microbatches)
        engine.forward_backward(microbatches, loss_of(OBJECTIVES["rl"], sequences))
        engine.optimizer_step()
    session.checkpoints.save(2, engine, {})
    export_huggingface(engine, session.export_dir, config.model.path, config.bridge.bucket_bytes)
    dist.barrier()
    # An index that names the directory, and the manifest with its digest.
    left = {name: hash for name, hash in digests(out).items() if not name.endswith((".metadata", "manifest.json"))}
    assert any(name.endswith(".distcp") for name in left) and any(name.endswith(".safetensors") for name in left)
    return left, [stats.logprobs.tolist() for stats in reference.token_stats(microbatches)]


def training_is_untouched(layout: ParallelLayout, root: Path) -> None:
    """Checkpoint, export and reference log-probabilities are bit for bit those of a run without noise."""
    noisy, clean = train(root, layout, True), train(root, layout, False)
    assert noisy[0] == clean[0], [name for name in clean[0] if noisy[0].get(name) != clean[0][name]]
    assert noisy[1] == clean[1]


def behaviour_is_recomputed(layout: ParallelLayout, root: Path) -> None:
    """Inside, the trainer is what the engine was sent, from masters finer than bfloat16; outside it is itself again."""
    config = aqn_config(BLOCKS, "bfloat16")
    config.aqn.old_logprobs, config.aqn.schedule, config.aqn.sigma_start = "recompute_noisy", "constant", 0.2
    session = new_session(config, layout, root / "qwen3", 1, root / "behaviour")
    engine = build_engine(config, layout, root / "qwen3", 4)
    noise, collector = AqnNoise(config.aqn, total_steps=10), Collector()
    sync = new_sync(session, engine, collector, noise)
    sequences = make_sequences(OBJECTIVES["rl"], 250)
    microbatches = pack_for_rank(BLOCKS, layout, sequences)
    engine.forward_backward(microbatches, loss_of(OBJECTIVES["rl"], sequences))
    engine.optimizer_step()
    name = "model.layers.1.input_layernorm.weight"
    local = engine.policy.parameters["decoder.layers.1.input_layernorm.weight"]
    master = engine.master_weights([name])[name]
    assert not torch.equal(master, local.float()) and torch.equal(master.bfloat16(), local)
    pushed = sync.push(version=3)
    sent = (master + noise_of(name, master.numel(), 3, 0.2)).bfloat16()
    assert torch.equal(collector.tensors[name], sent)
    before, clean = state_of(engine), engine.token_stats(microbatches)
    with suppress(KeyError), behaviour_policy(engine, noise, pushed):
        assert torch.equal(local, sent)
        noisy = engine.token_stats(microbatches)
        for forbidden in (
            engine.optimizer_step,
            lambda: session.checkpoints.save(1, engine, {}),
            lambda: export_huggingface(engine, session.export_dir, config.model.path, config.bridge.bucket_bytes),
            lambda: sync.push(version=4),
        ):
            refuses(forbidden)
        raise KeyError("the old values come back whatever happens")
    is_unchanged(before, state_of(engine))
    again = engine.token_stats(microbatches)
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(clean, again, strict=True))
    difference = max(float((a.logprobs - b.logprobs).abs().max()) for a, b in zip(clean, noisy, strict=True))
    assert difference > 0.05, difference


def refuses(forbidden: Any) -> None:
    try:
        forbidden()
    except RuntimeError as error:
        assert "noisy values stand in" in str(error), error
    else:
        raise AssertionError("no error")


def float32_is_refused(layout: ParallelLayout, root: Path) -> None:
    engine = build_engine(aqn_config(BLOCKS), layout, root / "qwen3", 4)
    name = "model.layers.0.input_layernorm.weight"
    before = state_of(engine)
    try:
        with engine.policy.replaced({name: torch.zeros(64)}):
            raise AssertionError("no error")
    except ValueError as error:
        assert "aqn.old_logprobs" in str(error) and "model.dtype" in str(error), error
    is_unchanged(before, state_of(engine))


class Live:
    """A real engine of two ranks beside the trainer, pushed in place."""

    def __init__(self, layout: ParallelLayout, root: Path) -> None:
        self.path = root / "live"
        self.config = aqn_config(BLOCKS, four_bits="nvfp4")
        self.config.rollout.weight_update, self.config.rollout.tensor_parallel_size = "live", 2
        self.config.bridge.verify = "all"
        aqn = self.config.aqn  # two stages of five steps
        aqn.schedule, aqn.num_stages, aqn.sigma_start, aqn.sigma_end = "linear", 2, 0.2, 0.1
        self.session = new_session(self.config, layout, self.path, 2, root)
        self.trainer = build_engine(self.config, layout, self.path, 4)
        self.engine: VLLMEngine = start(self.path, tensor_parallel_size=2)
        self.noise = behaviour.noise_of(self.session, 10)
        weights = SentWeights(self.session.shape, torch.float32, self.config.bridge.bucket_bytes, self.session.device)
        sink = InPlaceSink(self.engine, weights, self.session.engine_layout)
        layout = colocated_layout(weights, self.session.engine_layout)
        assert sink.obstacle(outgoing.load_proof(self.session, self.trainer, weights, layout)) is None
        self.sync = outgoing.weight_sync(self.session, self.trainer, sink, self.noise)
        self.clean = clean_tensors(self.path)

    def holds(self, expected: dict[str, torch.Tensor]) -> None:
        live = self.engine.parameters()
        rank = self.session.engine_layout.tensor_rank(dist.get_rank())
        for piece in vllm_slices(self.session.shape, 2, rank):
            wanted = expected[piece.hf_name][indices(piece.hf_box)]
            assert torch.equal(live[piece.local_name][indices(piece.local_box)], wanted), piece.hf_name

    def read_back(self) -> None:
        """Every worker holds w + Z and four bits of the rest, samples with them, and forgot what it had cached."""
        model = AutoModelForCausalLM.from_pretrained(self.path).eval()
        equals_hf(self.engine, model)  # fills the prefix cache
        assert self.sync.push(version=3).sigma == 0.2
        expected = expected_tensors(self.clean, 3, 0.2, "nvfp4", is_mixture=False)
        self.holds(expected)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(expected[name])
        equals_hf(self.engine, model)
        self.sync.push(version=4, is_validation=True)
        self.holds(self.clean)

    def hundred_syncs(self) -> None:
        """At constant sigma the spread around the trained weights stays sigma, whatever came before."""
        self.sync.transforms, self.sync.proof = self.sync.transforms[:1], None  # the noise
        targets = [n for n, role in roles(self.session.shape).items() if role.endswith("layernorm") and "layers" in n]
        live = self.engine.parameters()
        spreads = []
        for version in range(10, 110):
            assert self.sync.push(version=version).sigma == 0.1
            spreads.append(float(torch.cat([live[name] - self.clean[name] for name in targets]).std()))
        assert len(targets) == 4 and max(abs(s / 0.1 - 1) for s in spreads) < 0.2, spreads  # 512 channels: 3 %
        self.sync.push(version=110, is_validation=True)
        self.holds(self.clean)


def main() -> None:
    dist.init_process_group(platform.current().backend)
    for root in shared_directory():
        if dist.get_rank() == 0:
            for family in ("qwen3", "qwen3_moe"):
                tiny_models.make(family).save_pretrained(root / family)
            rollout_support.save(rollout_support.tiny_model("qwen2", tied=False), root / "live")
        dist.barrier()
        for case in CASES:
            with groups(case) as layout:
                check(f"stream_{case.name}", stream_is_the_specified_one, case, layout, case.families[0], root)
        with groups(BLOCKS) as layout:
            check("cut_blocks_are_refused", cut_blocks_are_refused, layout, root)
            check("float32_is_refused", float32_is_refused, layout, root)
            check("behaviour_is_recomputed", behaviour_is_recomputed, layout, root)
            check("training_is_untouched", training_is_untouched, layout, root)
            live = Live(layout, root)
            check("read_back", live.read_back)
            check("hundred_syncs", live.hundred_syncs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
