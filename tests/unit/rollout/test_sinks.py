"""Weight sinks: what every one must do, which one ``rollout.weight_update`` gets, and what is said."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mega_rl.bridge.mapping.megatron import ModelChunk, megatron_slices
from mega_rl.bridge.mapping.tensors import full_series, hf_tensors
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.reshard.proof import LoadProof, Proof
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Box, indices
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import ModelShape, parse_config
from mega_rl.parallel.joint_group import MeetingPoint, join_store
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout import receiver
from mega_rl.rollout.receiver import Link, Receiver
from mega_rl.rollout.remote import sink
from mega_rl.rollout.remote.sink import RemoteSink, remote_sink
from mega_rl.rollout.sinks import InPlaceSink, LoaderSink, SentWeights, WeightSink, colocated_sink
from mega_rl.rollout.vllm.engine import VLLMEngine
from tests.distributed.bridge.test_bridge_execute import SHAPE, local_parameters, random_model
from tests.models import families

ODD = "model.layers.0.mlp.down_proj.weight"
DTYPE = torch.bfloat16
ENGINES = EngineLayout(world_size=1, tensor_parallel_size=1)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A default group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def weights(shape: ModelShape = SHAPE, device: str = "cpu") -> SentWeights:
    return SentWeights(shape, DTYPE, 1 << 12, torch.device(device))


def model_path(shape: ModelShape = SHAPE) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face directory."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator).to(DTYPE) for name, size in hf_tensors(shape).items()}


def loaded(shape: ModelShape = SHAPE) -> dict[str, torch.Tensor]:
    """What an engine that has loaded them holds."""
    return local_parameters(slices_of(vllm_series(shape, 1, 0)), model_path(shape), DTYPE)


def load_proof(shape: ModelShape = SHAPE, num_loading: int = 1) -> LoadProof:
    """Of engines of one worker each, by a trainer of one rank."""
    model = model_path(shape)

    def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
        return model[hf_name][indices(hf_box)]

    engine = [vllm_series(shape, 1, 0)]
    proof = LoadProof(hf_tensors(shape), slices_of(full_series(shape)), engine, num_loading, read)
    model.clear()  # from here on the trainer holds what it likes
    return proof


class Engine(VLLMEngine):
    """The live parameters of one, and no vLLM behind them."""

    def __init__(self, shape: ModelShape = SHAPE) -> None:
        self.live = loaded(shape)
        self.loaded: dict[str, torch.Tensor] = {}
        self.dropped: list[set[str]] = []  # what need not be kept, of every sleep that was told so
        self.is_awake, self.has_cache, self._asleep = True, True, set()
        self._rollout, self._device_type, self._is_live, self._can_sleep = RolloutConfig(), "npu", True, True
        self._loaded, self._under_way, self._version, self._sees = None, {}, 0, False
        self._names = frozenset(self.live)
        self._llm = SimpleNamespace(
            reset_prefix_cache=lambda: True,
            sleep=lambda level: vars(self).update(is_awake=False, has_cache=False),
            wake_up=self._wake_up,
        )

    def _wake_up(self, tags: list[str]) -> None:
        (part,) = tags
        assert part == "weights" or self.is_awake, (
            "weights wake up first: the trainer's may be in the place of the cache"
        )
        vars(self).update({"weights": {"is_awake": True}, "kv_cache": {"has_cache": True}}[part])

    def _call(self, method: str, *args: Any) -> Any:
        assert self.is_awake, f"{method} of an engine that sleeps"
        if method == "receiver_dropped":
            self.dropped.append(set(args[0]))
            return nullcontext()
        if method == "receiver_load":
            self.loaded |= {name: tensor.clone() for name, tensor in args[0]}
            return self._names
        return self.live


class Worker:
    """The methods of ``EngineProcess`` that a sink calls, in a thread of this process."""

    def __init__(self, shape: ModelShape) -> None:
        self.live = loaded(shape)
        self.version = 0

    def process_id(self) -> int:
        return 0

    def connect(self, link: Link) -> None:
        self.receiver = Receiver(link, lambda: self.live)

    def receive(self) -> None:
        self.receiver.receive()

    def finish_update(self, version: int) -> None:
        self.version = version

    def inspect(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.live, *arguments)


class Threads:
    """Stands for ``EngineGroup``: its workers are threads, which really exchange bytes with the trainer's rank."""

    host = "127.0.0.1"

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers, self._pool = workers, ThreadPoolExecutor(len(workers))

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Future[Any]]:
        pairs = zip(self.workers, arguments, strict=True)
        return [self._pool.submit(getattr(worker, method), *of_worker) for worker, of_worker in pairs]

    def results(self, calls: Sequence[Future[Any]], doing: str) -> list[Any]:
        return [call.result() for call in calls]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], doing: str) -> list[Any]:
        return self.results(self.submit(method, arguments), doing)


def elsewhere(workers: Sequence[Worker]) -> Any:
    """What a sink needs of ``RemoteEngines``."""
    return SimpleNamespace(
        fleet=Threads(workers), num_workers=len(workers), engine_size=1, weight_version=0, collective_timeout_s=60.0
    )


def join(point: MeetingPoint, rank: int, store: Any = None) -> Any:
    """``join_group`` for several ranks of one process: torch keeps no table of these groups."""
    store, kind = store or join_store(point), dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, point.world_size)
    group._set_default_backend(kind)
    gloo = dist.ProcessGroupGloo(store, rank, point.world_size, datetime.timedelta(minutes=2))
    group._register_backend(torch.device("cpu"), kind, gloo)
    return group


@dataclass
class Case:
    sink: WeightSink
    held: Callable[[], list[dict[str, torch.Tensor]]]  # what every worker holds
    is_loader: bool = False
    engine: Engine | None = None  # that shares memory with the trainer


@pytest.fixture(params=["in_place", "loader", "remote"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_rank: None) -> Case:
    if request.param == "remote":
        monkeypatch.setattr(sink, "join_group", join)
        monkeypatch.setattr(receiver, "join_group", join)
        workers = [Worker(SHAPE), Worker(SHAPE)]
        return Case(RemoteSink(elsewhere(workers), weights()), lambda: [worker.live for worker in workers])
    engine = Engine()
    if request.param == "loader":
        return Case(LoaderSink(engine, weights(), 1), lambda: [engine.loaded], is_loader=True, engine=engine)
    return Case(InPlaceSink(engine, weights(), ENGINES), lambda: [engine.live], engine=engine)


class Trainer:
    """One rank that holds all of a model."""

    def __init__(self) -> None:
        self.slices = megatron_slices(SHAPE, ModelChunk(range(SHAPE.num_layers)))
        self.model = random_model(DTYPE)

    def read(self, local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
        return self.model[hf_name][indices(hf_box)]


def test_an_update_reaches_every_weight_of_every_worker(case: Case) -> None:
    trainer = Trainer()
    case.sink.connect([trainer.slices])
    assert case.sink.weight_version == 0
    for version in (4, 5):
        trainer.model = {name: tensor + version for name, tensor in trainer.model.items()}
        transfer_count = case.sink.update(trainer.read, version)
        assert case.sink.weight_version == version
        layout = case.sink.layout()
        assert len(layout) == len(case.held())
        for series, held in zip(layout, case.held(), strict=True):
            for piece in slices_of(series):
                expected = trainer.model[piece.hf_name][indices(piece.hf_box)]
                assert torch.equal(held[piece.local_name][indices(piece.local_box)].view_as(expected), expected), piece
        num_bytes = DTYPE.itemsize * sum(tensor.numel() for tensor in trainer.model.values()) * len(layout)
        assert case.is_loader == (transfer_count is None)
        assert transfer_count is None or transfer_count.bytes_local + transfer_count.bytes_sent == num_bytes


def test_after_the_first_update_only_what_can_change_is_sent(case: Case) -> None:
    """Kinds of tensors, such as the down projections of all layers; a loader needs everything each time."""
    trainer = Trainer()
    case.sink._weights = replace(weights(), changing=frozenset({ODD}))  # type: ignore[attr-defined]
    case.sink.connect([trainer.slices])
    case.sink.update(trainer.read, 1)
    before = dict(trainer.model)
    trainer.model = {name: tensor + 1 for name, tensor in trainer.model.items()}
    for version in (2, 3):
        transfer_count = case.sink.update(trainer.read, version)
        for series, held in zip(case.sink.layout(), case.held(), strict=True):
            for piece in slices_of(series):
                is_sent = case.is_loader or piece.hf_name.endswith("mlp.down_proj.weight")
                expected = (trainer.model if is_sent else before)[piece.hf_name][indices(piece.hf_box)]
                assert torch.equal(held[piece.local_name][indices(piece.local_box)].view_as(expected), expected), piece
        sent = DTYPE.itemsize * SHAPE.num_layers * trainer.model[ODD].numel() * len(case.held())
        assert transfer_count is None or transfer_count.bytes_local + transfer_count.bytes_sent == sent


def test_what_was_written_can_be_proved_or_is_not_to_be_seen(case: Case) -> None:
    trainer = Trainer()
    case.sink.connect([trainer.slices])
    case.sink.update(trainer.read, 1)
    if case.sink.inspect is None:
        assert case.is_loader
        return
    layout = case.sink.layout()
    proof = Proof(hf_tensors(SHAPE), trainer.slices, layout[:1], len(layout), is_sample=False, seed=0)
    assert proof.check(trainer.read, case.sink.inspect, 1) == len(hf_tensors(SHAPE))
    case.held()[-1]["model.norm.weight"][3] += 1
    with pytest.raises(RuntimeError, match="holds another model.norm.weight than the trainer"):
        proof.check(trainer.read, case.sink.inspect, 1)


def test_engines_that_share_the_device_make_room_and_wake_for_the_next_update(case: Case) -> None:
    trainer = Trainer()
    case.sink.connect([trainer.slices])
    case.sink.make_room()
    assert case.engine is None or not case.engine.is_awake
    case.sink.update(trainer.read, 1)
    assert case.engine is None or (case.engine.is_awake and not case.engine.has_cache)
    case.sink.begin_sampling()
    assert case.engine is None or case.engine.has_cache


@pytest.mark.parametrize("changing", [None, frozenset({ODD})])
def test_a_sleeping_engine_keeps_what_the_next_update_does_not_write(
    one_rank: None, changing: frozenset[str] | None
) -> None:
    """Rows of padding are kept, which only the engine has written, and all that is not sent again."""
    trainer, engine = Trainer(), Engine()
    embedding = engine.live["model.embed_tokens.weight"]
    engine.live["model.embed_tokens.weight"] = torch.cat([embedding, embedding[:1]])
    sink = InPlaceSink(engine, replace(weights(), changing=changing), ENGINES)
    sink.connect([trainer.slices])
    sink.make_room()
    assert engine.dropped == [], "nothing was written yet"
    sink.update(trainer.read, 1)
    sink.make_room()
    expected = set(engine.live) - {"model.embed_tokens.weight"}
    if changing is not None:
        expected = {name for name in expected if name.endswith("mlp.down_proj.weight")}
    assert engine.dropped == [expected]


def choose(
    engine: Engine, weight_update: str, verify: str, lines: list[str], shape: ModelShape = SHAPE
) -> type[WeightSink]:
    load = None if weight_update == "reload" else load_proof(shape)
    chosen = colocated_sink(
        engine, weights(shape), ENGINES, load=load, weight_update=weight_update, verify=verify, say=lines.append
    )
    return type(chosen)


@pytest.mark.parametrize("weight_update", ["auto", "live"])
def test_an_engine_as_the_mapping_says_is_written_in_place(weight_update: str, one_rank: None) -> None:
    lines: list[str] = []
    engine = Engine()
    assert choose(engine, weight_update, "all", lines) is InPlaceSink and engine._is_live and lines == []


def test_a_transposed_weight_goes_through_the_loader_and_says_so(one_rank: None) -> None:
    lines: list[str] = []
    engine = Engine()
    engine.live[ODD] = engine.live[ODD].t().contiguous()
    assert choose(engine, "auto", "off", lines) is LoaderSink and not engine._is_live
    (line,) = lines
    assert "own loader" in line and ODD in line and str(list(engine.live[ODD].shape)) in line


@pytest.mark.parametrize(
    ("weight_update", "verify", "words"),
    [
        ("live", "off", "rollout.weight_update=live cannot write .*down_proj.*rollout.weight_update=reload"),
        ("auto", "sample", "bridge.verify=sample can prove only .*down_proj.*bridge.verify=off"),
    ],
)
def test_what_was_asked_for_and_cannot_be_is_refused(
    weight_update: str, verify: str, words: str, one_rank: None
) -> None:
    engine = Engine()
    engine.live[ODD] = engine.live[ODD].t().contiguous()
    with pytest.raises(InputError, match=words):
        choose(engine, weight_update, verify, [])
    assert engine._is_live


def test_a_tower_that_cannot_be_written_goes_through_the_loader_too(one_rank: None) -> None:
    shape = parse_config(families.CONTRACT.config("qwen3_vl"), "qwen3_vl")
    engine = Engine(shape)
    assert choose(engine, "auto", "off", [], shape) is InPlaceSink
    engine.live = {name: tensor for name, tensor in engine.live.items() if not name.endswith("patch_embed.proj.weight")}
    with pytest.raises(InputError, match="weight_update=live cannot write .*patch_embed.*weight_update=reload"):
        choose(engine, "live", "off", [], shape)
    assert choose(engine, "auto", "off", lines := [], shape) is LoaderSink and "patch_embed" in lines[0]


@pytest.mark.parametrize(
    ("weight_update", "words"),
    [
        ("live", "rollout.weight_update=live cannot write .*down_proj.*rollout.weight_update=reload"),
        ("auto", "rollout.placement=separate cannot write .*down_proj.*rollout.placement=colocated"),
    ],
)
def test_engines_elsewhere_that_cannot_be_written_to_are_refused(
    weight_update: str, words: str, one_rank: None
) -> None:
    workers = [Worker(SHAPE), Worker(SHAPE)]
    assert isinstance(remote_sink(elsewhere(workers), weights(), load_proof(), weight_update), RemoteSink)
    workers[1].live[ODD] = workers[1].live[ODD].t().contiguous()
    with pytest.raises(InputError, match=words):
        remote_sink(elsewhere(workers), weights(), load_proof(), weight_update)


# The second weight of these experts is square: turned it has the shape that it had.
SQUARE = replace(SHAPE, mixture=Mixture(frozenset(range(SHAPE.num_layers)), 4, 2, SHAPE.hidden_size, True))


def other_value(live: dict[str, torch.Tensor]) -> str:
    live["model.layers.2.self_attn.o_proj.weight"][3, 5] += 1
    return "model.layers.2.self_attn.o_proj.weight"


def swapped_halves(live: dict[str, torch.Tensor]) -> str:
    """Gate and up in the other order, as kernels of FlashInfer want them: the shape stays."""
    name = "model.layers.1.mlp.gate_up_proj.weight"
    live[name].copy_(live[name].roll(len(live[name]) // 2, 0))
    return "model.layers.1.mlp.gate_proj.weight"


def swapped_experts(live: dict[str, torch.Tensor]) -> str:
    name = "model.layers.1.mlp.experts.routed_experts.w13_weight"
    live[name].copy_(live[name].roll(live[name].shape[1] // 2, 1))
    return "model.layers.1.mlp.experts.0.gate_proj.weight"


REARRANGED = [(other_value, SHAPE), (swapped_halves, SHAPE), (swapped_experts, SQUARE)]


@pytest.mark.parametrize(("rearrange", "shape"), REARRANGED, ids=["other", "dense", "experts"])
def test_an_engine_that_holds_other_values_than_it_loaded_goes_through_the_loader(
    rearrange: Callable[[dict[str, torch.Tensor]], str], shape: ModelShape, one_rank: None
) -> None:
    lines: list[str] = []
    engine = Engine(shape)
    name = rearrange(engine.live)
    with pytest.raises(InputError, match=rf"weight_update=live cannot write {name}, of which .*weight_update=reload"):
        choose(engine, "live", "off", [], shape)
    with pytest.raises(InputError, match=rf"bridge.verify=all can prove only .*{name}, of which the engine"):
        choose(engine, "auto", "all", [], shape)
    before = {name: tensor.clone() for name, tensor in engine.live.items()}
    assert choose(engine, "auto", "off", lines, shape) is LoaderSink and not engine._is_live
    (line,) = lines
    assert "own loader" in line and f"{name}, of which the engine on rank 0 holds other values than model.path" in line
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.live.items()), "the proof only reads"


def test_only_the_engines_that_load_are_compared(one_rank: None) -> None:
    workers = [Worker(SHAPE), Worker(SHAPE)]
    swapped_halves(workers[1].live)
    assert isinstance(remote_sink(elsewhere(workers), weights(), load_proof(num_loading=1), "auto"), RemoteSink)
    with pytest.raises(InputError, match=r"layers.1.mlp.gate_proj.weight, of which the engine on rank 1 "):
        remote_sink(elsewhere(workers), weights(), load_proof(num_loading=2), "auto")


def test_reload_asks_the_engine_nothing() -> None:
    engine = Engine()
    engine.is_awake = False  # any question would be answered with an error
    assert choose(engine, "reload", "off", []) is LoaderSink and not engine._is_live
