"""The families of the tests and of the tiny models are those of the table of families."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from mega_rl.bridge.mapping.tensors import LM_HEAD, hf_tensors
from mega_rl.bridge.mapping.tower import tower_names
from mega_rl.models import shape as shapes
from mega_rl.models.fit import engine_problems
from mega_rl.models.shape import BY_NAME, FAMILIES, ModelShape, parse_config
from mega_rl.synthetic import tiny_model
from tests.models import families, layouts, vision_models


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(FAMILIES)


def test_the_table_of_the_tests_has_every_family_and_no_other() -> None:
    assert set(families.OPTIONS) == set(BY_NAME)
    for scale in (families.CONTRACT, families.TRAINER, families.ENGINE, families.FILES):
        assert {scale.family(name) for name in scale.own} <= set(BY_NAME)


def test_tiny_models_name_families_as_the_table_does() -> None:
    for name in tiny_model.FAMILIES:
        kind = AutoModelForImageTextToText if name == tiny_model.SEEING else AutoModelForCausalLM
        model_class = kind._model_mapping[type(AutoConfig.for_model(name))]
        assert FAMILIES[model_class.__name__].name == name


def test_variants_of_the_contract_begin_with_their_family() -> None:
    for name in families.CONTRACT.own:
        assert name.startswith(families.CONTRACT.family(name))
    assert set(BY_NAME) <= set(families.CONTRACT.own)


def test_layouts_name_families_by_what_they_have() -> None:
    for names, has_experts, is_latent in (
        (layouts.DENSE, False, False),
        (layouts.MIXTURE, True, False),
        (layouts.LATENT, True, True),
        (layouts.VISION, False, False),
        (layouts.VISION_MIXTURE, True, False),
    ):
        for name in names:
            assert (BY_NAME[name].mixture is not None, BY_NAME[name].latent is not None) == (has_experts, is_latent)


def shape_of(family: str) -> ModelShape:
    return parse_config(families.CONTRACT.config(family), family)


def test_engines_are_tested_with_every_family_that_they_take() -> None:
    taken = {name for name in BY_NAME if not engine_problems(shape_of(name), 1)}
    seeing = set(vision_models.TOWERS)  # in tests/distributed/stages/test_vision_rl.py
    assert taken == set(families.ENGINE.own) | seeing


@pytest.mark.parametrize("family", BY_NAME)
def test_names_of_the_decoder_begin_as_its_family_says(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(family)
    before = hf_tensors(shape)
    decoder = BY_NAME[family].decoder
    others = (LM_HEAD, *(name for name, _, _ in tower_names(shape)))
    assert all(name.startswith(f"{decoder}.") or name in others for name in before)
    elsewhere = dataclasses.replace(BY_NAME[family], decoder="model.elsewhere")
    monkeypatch.setitem(shapes.BY_NAME, family, elsewhere)
    moved = {
        name if name in others else name.replace(decoder, "model.elsewhere", 1): size for name, size in before.items()
    }
    assert hf_tensors(shape) == moved
