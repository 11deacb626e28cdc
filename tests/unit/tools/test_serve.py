"""The command line of ``tools/serve.py``: what it refuses before anything heavy starts, and what engines get."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mega_rl.errors import InputError
from mega_rl.evaluation.weights import find_weights
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model
from tests.launching.launch import free_port

pytest.importorskip("uvicorn")  # comes with vLLM, which need not be there
from tools import serve  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = TinyModelSpec(hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=1, ffn=8, max_positions=64)
    return write_tiny_model(tmp_path_factory.mktemp("serve") / "tiny", spec, arithmetic_tokenizer())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from elsewhere; put a key into MEGA_RL_SERVE_KEYS"),
        (["--max-requests", "0"], "--max-requests is 0; give at least 1"),
        (["--session-idle-s", "nan"], "--session-idle-s is nan; give more than 0"),
        (["--tensor-parallel", "2"], "--tensor-parallel 2 needs processes of its own: give --engines 1"),
        (["--tool-parser", "hermess"], "'hermess' is none of vLLM's"),
        (["--max-model-len", "1"], "a prompt and a response take at least 2 tokens"),
        (["--max-model-len", "65"], "make the sum at most the model's max_position_embeddings, 64"),
        (["data.colour=3"], "data.colour"),
        (["--config", "gone.yaml"], "gone.yaml"),
        (["--port", "70000", "--max-model-len", "64"], "--port 70000 cannot be listened on"),
        (["--record", "/proc/nowhere", "--max-model-len", "64"], "no chat template"),
    ],
)
def test_impossible_wishes_are_refused(model: Path, arguments: list[str], words: str) -> None:
    port = [] if "--port" in arguments else ["--port", "0"]
    with pytest.raises(InputError) as caught:
        serve.main([str(model), *port, *arguments])
    assert words in str(caught.value)


def test_a_weak_key_and_a_taken_port_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGA_RL_SERVE_KEYS", "a-key-of-some-length short")
    with pytest.raises(InputError, match="has 5 characters; give at least 16"):
        serve.main([str(model)])
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(InputError, match="cannot be listened on"):
        serve.main([str(model), "--port", str(port), "--max-model-len", "64"])


def test_the_engine_takes_the_length_whatever_is_prompt_of_it(model: Path) -> None:
    options = serve.parse([str(model), "--max-model-len", "48", "--engines", "2", "--tensor-parallel", "2"])
    config = serve.configured(options, find_weights(str(model)))
    assert config.data.max_prompt_length + config.data.max_response_length == 48
    rollout = config.rollout
    assert (rollout.placement, rollout.num_engines, rollout.tensor_parallel_size) == ("separate", 2, 2)
