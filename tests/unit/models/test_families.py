"""The families of every test and of the tiny models are rows of the one table."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import AutoModelForCausalLM

from mega_rl.bridge.mapping.tensors import LM_HEAD, hf_tensors
from mega_rl.data import tiny_model
from mega_rl.models import shape as shapes
from mega_rl.models.fit import engine_problems
from mega_rl.models.shape import BY_NAME, FAMILIES, ModelShape, parse_config
from tests.contract import families
from tests.distributed import layouts, rollout_support, tiny_models
from tests.unit.bridge import test_huggingface


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(FAMILIES)


@pytest.mark.parametrize(
    "classes",
    [
        {name: row.model_class for name, row in tiny_models.FAMILIES.items()},
        {name: model_class for name, (_, model_class) in rollout_support.FAMILIES.items()},
        {name: model_class for name, (_, model_class, _) in test_huggingface.FAMILIES.items()},
        {name: AutoModelForCausalLM._model_mapping[config] for name, config in tiny_model.FAMILIES.items()},
    ],
    ids=["trainer", "engine", "files", "tiny"],
)
def test_tables_of_tests_name_families_as_the_table_does(classes: dict[str, type]) -> None:
    for name, model_class in classes.items():
        assert FAMILIES[model_class.__name__].name == name


def test_variants_of_the_contract_begin_with_their_family() -> None:
    for name, (architecture, _) in families.FAMILIES.items():
        assert name.startswith(FAMILIES[f"{architecture}ForCausalLM"].name)
    assert set(BY_NAME) <= set(families.FAMILIES)


def test_layouts_name_families_by_what_they_have() -> None:
    for names, has_experts, is_latent in (
        (layouts.DENSE, False, False),
        (layouts.MIXTURE, True, False),
        (layouts.LATENT, True, True),
    ):
        for name in names:
            assert (BY_NAME[name].mixture is not None, BY_NAME[name].latent is not None) == (has_experts, is_latent)


def shape_of(family: str) -> ModelShape:
    architecture, changes = families.FAMILIES[family]
    name = f"{architecture}ForCausalLM"
    return parse_config({**families.COMMON, **changes, "architectures": [name]}, family)


def test_engines_are_tested_with_every_family_that_they_take() -> None:
    taken = {name for name in BY_NAME if not engine_problems(shape_of(name), 1)}
    assert taken == set(rollout_support.FAMILIES)


@pytest.mark.parametrize("family", BY_NAME)
def test_names_of_the_decoder_begin_as_its_family_says(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(family)
    before = hf_tensors(shape)
    assert all(name.startswith("model.") or name == LM_HEAD for name in before)
    elsewhere = dataclasses.replace(BY_NAME[family], decoder="model.language_model")
    monkeypatch.setitem(shapes.BY_NAME, family, elsewhere)
    moved = {name if name == LM_HEAD else f"model.language_{name}": size for name, size in before.items()}
    assert hf_tensors(shape) == moved
