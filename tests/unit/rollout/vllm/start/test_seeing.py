"""What an engine is given for a prompt with pictures, and what it must answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mega_rl.errors import InputError
from mega_rl.rollout.remote.engine_process import EngineProcess
from mega_rl.rollout.vllm.start.options import check_options
from mega_rl.rollout.vllm.start.seeing import PromptRenderer, Sight, check_tokens, sight_arguments
from mega_rl.rollout.vllm.start.versions import picture_constants_kept
from mega_rl.types import Prompt, PromptImage
from tests.models import families

TOKEN = 9
SIZES = {"a": 3, "b": 2}  # tokens of a picture


class Picture:
    def __init__(self, key: str) -> None:
        self.key = key

    def resized(self) -> Image.Image:
        return Image.new("RGB", (SIZES[self.key], 1))


class Rendering:
    """In the place of ``vllm.LLM``: makes as many tokens of one as its picture is wide."""

    def __init__(self, more: int = 0) -> None:
        self.given: list[Any] = []
        self.more = more
        self.llm_engine = SimpleNamespace(renderer=self)

    def render_cmpl(self, prompts: list[Any]) -> list[Any]:
        (prompt,) = prompts
        self.given.append(prompt["prompt_token_ids"])
        pictures = iter(prompt["multi_modal_data"]["image"])
        ids = [
            one
            for token in prompt["prompt_token_ids"]
            for one in ([token] * (next(pictures).width + self.more) if token == TOKEN else [token])
        ]
        return [{"type": "multimodal", "prompt_token_ids": ids, "mm_hashes": len(self.given)}]


def seeing(llm: Rendering) -> PromptRenderer:
    return PromptRenderer(llm, Sight({key: Picture(key) for key in SIZES}, 2, {}))


def prompt(*tail: int) -> Prompt:
    images = (PromptImage("a", 1, 3), PromptImage("b", 5, 2))
    return Prompt(7, (1, 9, 9, 9, 2, 9, 9, *tail), "", "", "", {}, images)


def test_a_text_is_given_as_tokens() -> None:
    plain = Prompt(0, (1, TOKEN), "", "", "")
    assert PromptRenderer(None, None)(plain) == {"type": "token", "prompt_token_ids": [1, TOKEN]}


def test_tokens_behind_the_last_picture_are_never_looked_at() -> None:
    llm = Rendering()
    given = seeing(llm)(prompt(3, TOKEN, 4))
    assert llm.given == [[1, 9, 2, 9]], "one token for each picture, and nothing of what follows"
    assert given == {"type": "multimodal", "prompt_token_ids": [1, 9, 9, 9, 2, 9, 9, 3, 9, 4], "mm_hashes": 1}


def test_the_samples_of_a_prompt_are_rendered_once() -> None:
    llm = Rendering()
    renderer = seeing(llm)
    assert [renderer(prompt(*tail))["mm_hashes"] for tail in ((3,), (3,), (3, 4))] == [1, 1, 1]
    renderer(Prompt(8, (9, 9, 9), "", "", "", {}, (PromptImage("a", 0, 3),)))
    assert len(llm.given) == 2


def test_an_engine_elsewhere_has_pictures_only_while_it_takes_requests() -> None:
    process, seen = EngineProcess(), []

    class Engine:
        def enter(self, requests: Any) -> list[int]:
            seen.append(dict(process._shown))
            if requests == ["bad"]:
                raise InputError("a picture cannot be read")
            return [1]

        submit = enter

    engine: Any = Engine()
    process._engine = process._sampler = engine
    requests: Any = ["one"]
    process.issue(0, 5, [0], requests, {"a": Picture("a")})
    process.submit(requests)
    with pytest.raises(InputError, match="cannot be read"):
        process.submit(["bad"], {"b": Picture("b")})  # type: ignore[list-item]
    assert [list(shown) for shown in seen] == [["a"], [], ["b"]] and not process._shown


def test_an_engine_that_makes_other_tokens_of_a_picture() -> None:
    with pytest.raises(RuntimeError, match="makes 9 tokens of the beginning of prompt 7, which has 7"):
        seeing(Rendering(more=1))(prompt(3))


def test_an_answer_to_other_tokens() -> None:
    check_tokens(prompt(3), SimpleNamespace(prompt_token_ids=list(prompt(3).token_ids)))
    with pytest.raises(RuntimeError, match="given 8 tokens for prompt 7 and answered 7 others"):
        check_tokens(prompt(3), SimpleNamespace(prompt_token_ids=list(prompt().token_ids)))


def test_an_engine_keeps_no_processed_pictures_and_of_text_alone_no_tower(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(families.CONTRACT.config("qwen3_vl")))
    seeing = sight_arguments(str(tmp_path), Sight({}, 3, {"longest_edge": 64}))
    assert seeing is not None and seeing["limit_mm_per_prompt"] == {"image": 3, "video": 0}
    assert seeing["mm_processor_cache_gb"] == 0, "each of vLLM's caches would take 4 GiB beside the trainer"
    with pytest.raises(InputError, match=r"rollout.vllm.mm_processor_cache_gb is set by mega_rl itself"):
        check_options({"mm_processor_cache_gb": 4}, None, "cpu")
    assert sight_arguments(str(tmp_path), None) == {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    (tmp_path / "config.json").write_text(json.dumps(families.CONTRACT.config("qwen3")))
    assert sight_arguments(str(tmp_path), None) is None


@pytest.mark.slow
def test_an_engine_that_reads_no_weights_normalises_pictures_too() -> None:
    """vLLM's dummy loader fills what a checkpoint would; of several engines only the first one reads weights."""
    norms = pytest.importorskip("vllm.model_executor.layers.fusion.mm_input_norm")
    from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def loaded() -> Any:
        model = norms.FusedMMInputNorm([0.5] * 3, [0.25] * 3, 1 / 255)
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, None)
        return model.weight.tolist() + model.bias.tolist()

    right = pytest.approx([4 / 255] * 3 + [-2.0] * 3)
    with set_current_vllm_config(VllmConfig()):
        assert loaded() != right, "vLLM has changed: picture_constants_kept may go"
        with picture_constants_kept():
            assert loaded() == right
