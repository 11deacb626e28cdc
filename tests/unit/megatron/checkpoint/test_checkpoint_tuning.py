"""A checkpoint of what was trained on one base is resumed by a run that trains the same on that base, else refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.config.schema.learning import AdapterConfig, TuningConfig, VisionConfig
from mega_rl.errors import InputError
from mega_rl.megatron.checkpoint.checkpoint import _check_tuning, tuning_record

LORA = TuningConfig(method="lora")
FREEZE = TuningConfig(method="freeze")


def engine_of(
    tuning: TuningConfig, base: str = "a" * 32, start: str | None = None, vision: VisionConfig | None = None
) -> Any:
    """``vision``: of a model with a tower; None: of one without."""
    is_full = tuning.method == "full" and (vision is None or not (vision.freeze or vision.freeze_merger))
    plan, shape = SimpleNamespace(is_full=is_full), SimpleNamespace(tower=vision)
    spec = SimpleNamespace(tuning=tuning, vision=vision or VisionConfig())
    return SimpleNamespace(policy=SimpleNamespace(plan=plan, spec=spec, shape=shape), base=base, adapter_start=start)


SEEING = [VisionConfig(), VisionConfig(freeze_merger=False), VisionConfig(freeze=False, freeze_merger=False)]


@pytest.mark.parametrize("saved", SEEING)
@pytest.mark.parametrize("own", SEEING)
def test_a_tower_is_trained_on_as_it_was(saved: VisionConfig, own: VisionConfig) -> None:
    record, engine = tuning_record(engine_of(TuningConfig(), vision=saved)), engine_of(TuningConfig(), vision=own)
    if saved == own:
        _check_tuning(Path("c"), record, engine)
    else:
        with pytest.raises(InputError, match="written with model.vision.freeze"):
            _check_tuning(Path("c"), record, engine)


@pytest.mark.parametrize("tuning", [TuningConfig(), LORA, FREEZE], ids=lambda tuning: tuning.method)
def test_the_same_run_goes_on(tuning: TuningConfig) -> None:
    _check_tuning(Path("c"), tuning_record(engine_of(tuning)), engine_of(tuning))


def test_dropout_may_change_and_is_not_in_records_from_before() -> None:
    other = TuningConfig(method="lora", adapter=AdapterConfig(dropout=0.1))
    _check_tuning(Path("c"), tuning_record(engine_of(LORA)), engine_of(other))
    record = tuning_record(engine_of(LORA))
    del record["tuning"]["settings"]["adapter"]["dropout"]
    _check_tuning(Path("c"), record, engine_of(LORA))


def test_checkpoints_from_before_are_of_full_training() -> None:
    assert tuning_record(engine_of(TuningConfig())) == {}


@pytest.mark.parametrize(
    ("saved", "own", "sentence"),
    [
        (LORA, TuningConfig(), "written with tuning.method 'lora', and this run has 'full'"),
        (TuningConfig(), LORA, "written with tuning.method 'full', and this run has 'lora'"),
        (LORA, TuningConfig(method="lora", adapter=AdapterConfig(rank=8)), "written with tuning.adapter.rank 16"),
        (LORA, TuningConfig(method="lora", also_train=["norm"]), "written with tuning.also_train []"),
        (FREEZE, TuningConfig(method="freeze", train_layers=3), "written with tuning.train_layers 2"),
    ],
)
def test_other_settings_are_refused(saved: TuningConfig, own: TuningConfig, sentence: str) -> None:
    with pytest.raises(InputError, match="checkpoint.resume to never") as error:
        _check_tuning(Path("c"), tuning_record(engine_of(saved)), engine_of(own))
    assert sentence in str(error.value)


def test_another_base_is_refused() -> None:
    with pytest.raises(InputError, match="on another base than the weights in model.path"):
        _check_tuning(Path("c"), tuning_record(engine_of(LORA)), engine_of(LORA, base="b" * 32))


def going_on(path: str | None, *, new: bool = False) -> TuningConfig:
    return TuningConfig(method="lora", adapter=AdapterConfig(path=path, new=new))


def test_the_adapter_of_the_start_may_move_but_not_change() -> None:
    record = tuning_record(engine_of(going_on("here"), start="one"))
    _check_tuning(Path("c"), record, engine_of(going_on("there"), start="one"))
    for other in (engine_of(going_on("here"), start="two"), engine_of(going_on(None))):
        with pytest.raises(InputError, match=r"began with another adapter than that of tuning\.adapter\.path"):
            _check_tuning(Path("c"), record, other)


def test_a_checkpoint_of_before_names_the_directory_of_the_adapter() -> None:
    record = tuning_record(engine_of(going_on("here")))
    del record["tuning"]["start"]
    _check_tuning(Path("c"), record, engine_of(going_on("here"), start="one"))
    with pytest.raises(InputError, match="began with another adapter"):
        _check_tuning(Path("c"), record, engine_of(going_on("there"), start="one"))


def test_another_merged_adapter_is_refused_by_its_key() -> None:
    record = tuning_record(engine_of(going_on("a", new=True)))
    with pytest.raises(InputError, match=r"model\.path with the adapter of tuning\.adapter\.path merged into them"):
        _check_tuning(Path("c"), record, engine_of(going_on("b", new=True), base="b" * 32))


def test_what_does_not_matter_may_differ() -> None:
    other = TuningConfig(method="lora", train_layers=7)
    _check_tuning(Path("c"), tuning_record(engine_of(LORA)), engine_of(other))
