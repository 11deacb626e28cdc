"""The endpoint as agents see it, through the real client, over engines that answer by rule."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

from mega_rl.rollout.engine import Request  # noqa: E402 - the client comes with vLLM, which need not be there
from mega_rl.serving.engines import home_of  # noqa: E402
from tests.models.chat_templates import tokenizer_of  # noqa: E402
from tests.pretended.serving import Served, serving  # noqa: E402

ASK = [{"role": "user", "content": "What is 2 + 2?"}]
HTTP = httpx.Client(timeout=120)  # this machine may be busy
KEY = "a key of a few letters"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


def client(served: Served, session: str | None = None, key: str = "none") -> Any:
    path = "/v1" if session is None else f"/sessions/{session}/v1"
    return openai.OpenAI(base_url=served.url + path, api_key=key, max_retries=0, timeout=120)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_models_health_and_metrics(served: Served) -> None:
    assert [model.id for model in client(served).models.list()] == ["tiny"]
    assert HTTP.get(served.url + "/health").json() == {"status": "ok"}
    assert "mega_rl_sampled_tokens_total" in HTTP.get(served.url + "/metrics").text


def test_a_chat_says_its_tokens_and_their_logprobs(served: Served) -> None:
    answer = client(served).chat.completions.create(
        model="any", messages=ASK, seed=5, n=2, logprobs=True, extra_body={"return_token_ids": True}
    )
    tokenizer = tokenizer_of("qwen2.5")
    rendered = tokenizer.apply_chat_template(ASK, add_generation_prompt=True)["input_ids"]
    assert answer.prompt_token_ids == rendered and answer.usage.prompt_tokens == len(rendered)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and choice.token_ids[-1] == tokenizer.eos_token_id
        assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert [entry.logprob for entry in choice.logprobs.content] == [-(1 + t) / 1024 for t in choice.token_ids]
    assert answer.choices[0].token_ids != answer.choices[1].token_ids, "each response has a seed of its own"
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


def test_a_seed_decides_and_no_seed_does_not(served: Served) -> None:
    def text(**keys: Any) -> str:
        return str(client(served).completions.create(model="m", prompt="abc", max_tokens=9, **keys).choices[0].text)

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert len({text() for _ in range(8)}) > 1


def test_a_stream_is_the_whole_answer_in_pieces(served: Served) -> None:
    chats = client(served).chat.completions
    whole = chats.create(model="m", messages=ASK, seed=1).choices[0].message.content
    chunks = list(chats.create(model="m", messages=ASK, seed=1, stream=True, stream_options={"include_usage": True}))
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == whole and len(texts) > 3
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["stop"] and chunks[-1].usage.completion_tokens > 1
    plain = client(served).completions
    pieces = plain.create(model="m", prompt=[5, 6, 7], seed=2, stream=True, extra_body={"return_token_ids": True})
    ids = [token for chunk in pieces for choice in chunk.choices for token in choice.model_extra.get("token_ids", ())]
    again = plain.create(model="m", prompt=[5, 6, 7], seed=2, extra_body={"return_token_ids": True})
    assert ids == again.choices[0].token_ids and again.choices[0].prompt_token_ids == [5, 6, 7]


def test_tokens_go_in_and_come_out(served: Served) -> None:
    body = {"token_ids": [9, 8, 7], "sampling_params": {"max_tokens": 3, "seed": 1, "logprobs": 0}}
    answer = HTTP.post(served.url + "/inference/v1/generate", json=body).json()
    (choice,) = answer["choices"]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["finish_reason"] in ("stop", "length") and len(choice["token_ids"]) <= 3
    assert HTTP.post(served.url + "/generate", json=body).json()["choices"] == answer["choices"]


def test_several_prompts_are_answered_in_their_order(served: Served) -> None:
    plain = client(served).completions
    answer = plain.create(model="m", prompt=["a", "b"], n=2, seed=1, extra_body={"return_token_ids": True})
    tokenizer = tokenizer_of("qwen2.5")
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.prompt_token_ids for choice in answer.choices] == [tokenizer(t)["input_ids"] for t in "aabb"]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 4


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": ASK, "top_p": 0.9}, "top_p=0.9 is not to be had here: leave it out"),
        ({"messages": ASK, "colour": 1}, "unknown field 'colour'"),
        ({"messages": "hello"}, "messages is 'hello'; give a list of chat messages"),
        ({"messages": [{"role": "user"}]}, "a chat message needs role and content"),
        ({"messages": ASK, "temperature": -1}, "temperature is -1"),
        ({"messages": ASK, "n": 0}, "n is 0; give a whole number from 1 to 128"),
        ({"messages": ASK, "max_tokens": True}, "max_tokens is True"),
        ({"messages": ASK, "stop": [""]}, "stop is [''];"),
        ({"messages": ASK, "tool_choice": "required"}, "tool_choice is 'required'"),
        ({"messages": ASK, "tools": [{}]}, "give every tool a function with a name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text can be read"),
        ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "more than 4096 tokens"),
        ([], "the request is no JSON object"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(served: Served, body: Any, words: str) -> None:
    answer = HTTP.post(served.url + "/v1/chat/completions", json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_only_json_from_this_machine_and_of_some_size_is_read(served: Served) -> None:
    path = served.url + "/v1/completions"
    assert HTTP.post(path, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert HTTP.get(served.url + "/v1/models", headers={"Host": "elsewhere.example"}).status_code == 403
    json_type = {"Content-Type": "application/json"}
    assert HTTP.post(path, content=b"{", headers=json_type).status_code == 400
    assert HTTP.post(path, content=b"[" * 100_000, headers=json_type).status_code == 400
    assert HTTP.post(path, content=rb'{"prompt": "half \ud800"}', headers=json_type).status_code == 400
    assert HTTP.post(path, content=rb'{"prompt": "whole \ud83d\ude00"}', headers=json_type).status_code == 200
    assert HTTP.post(path, content=b" " * ((1 << 24) + 1), headers=json_type).status_code == 413
    assert HTTP.post(path, json={"prompt": [400]}).json()["error"]["message"].startswith("there is no token 400")
    assert HTTP.get(served.url + "/nowhere").status_code == 404


def test_keys_are_asked_for() -> None:
    with serving(keys=[KEY]) as served:
        assert client(served, key=KEY).completions.create(model="m", prompt="a").choices
        with pytest.raises(openai.AuthenticationError):
            client(served, key="another").completions.create(model="m", prompt="a")
        assert HTTP.get(served.url + "/health").status_code == 200
        assert HTTP.get(served.url + "/metrics").status_code == 401


def test_calls_of_tools_are_found_and_go_on_in_tokens() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    say = 'So.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    def respond(request: Request) -> list[int]:
        is_first = "tool_response" not in tokenizer.decode(request.prompt.token_ids[-40:])
        return [*tokenizer(say if is_first else "It is 4.")["input_ids"], tokenizer.eos_token_id]

    with serving(respond) as served:
        chats = client(served, "s").chat.completions
        first = chats.create(model="m", messages=ASK, tools=[TOOL])
        (call,) = first.choices[0].message.tool_calls
        assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content == "So."
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        said = first.choices[0].message.model_dump(exclude_none=True)
        more = [*ASK, said, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        streamed = list(chats.create(model="m", messages=more, tools=[TOOL], stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in streamed) == "It is 4."
        told = HTTP.post(served.url + "/v1/sessions/s/reward", json={"reward": 1}).json()
        assert told == {"session": "s", "rows": 1, "sampled_tokens": len(respond_all(served))}
        ((rows, score),) = served.taken
        assert rows[0].sampled_ids.tolist() == respond_all(served) and score.value == 1.0
        assert [turn.role for turn in rows[0].turns] == ["prompt", "assistant", "tool", "assistant"]
        held = list(chats_without(served).create(model="m", messages=ASK, tools=[TOOL], stream=True))
        calls = [call for chunk in held for call in chunk.choices[0].delta.tool_calls or []]
        assert [call.function.name for call in calls] == ["add"] and held[-1].choices[0].finish_reason == "tool_calls"


def chats_without(served: Served) -> Any:
    return client(served).chat.completions


def respond_all(served: Served) -> list[int]:
    """What the engine answered to the first two requests."""
    (engine,) = served.engines
    return [token for request in engine.requests[:2] for token in engine.respond(request)]


def test_sixty_four_agents_at_once_are_all_recorded_as_they_were_sampled() -> None:
    with serving(num_engines=2, max_requests=40, width=7) as served:
        results = asyncio.run(_agents(served, 64))
        assert len(served.taken) == 64 and not len(served.endpoint.sessions or [])
        for rows, score in served.taken:
            name = rows[0].prompt.extra_info["session"]
            told = results[name]
            assert rows[0].sampled_ids.tolist() == [token for ids in told for token in ids] and len(rows) == 1
            sampled = rows[0].sampled_ids
            assert rows[0].logprobs[rows[0].loss_mask].tolist() == [-(1 + token) / 1024 for token in sampled]
            assert score.value == len(name) and [t.role for t in rows[0].turns][1::2] == ["assistant"] * 3
        assert max(engine.largest for engine in served.engines) <= 40
        assert all(engine.requests and not engine.aborted for engine in served.engines)
        again = asyncio.run(_agents(served, 8, prefix="again"))
        assert all(results[f"agent-{i}"] == again[f"again-{i}"] for i in range(8)), "the seed alone decides"


async def _agents(served: Served, number: int, prefix: str = "agent") -> dict[str, list[list[int]]]:
    """Three turns of each agent; returns by session the tokens that each turn was told to be."""

    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=100, timeout=300) as shared:

        async def agent(place: int) -> tuple[str, list[list[int]]]:
            name, told, messages = f"{prefix}-{place}", [], list(ASK)
            asked = shared.with_options(base_url=f"{served.url}/sessions/{name}/v1")
            for turn in range(3):
                answer = await asked.chat.completions.create(
                    model="m", messages=messages, seed=100 * place + turn, extra_body={"return_token_ids": True}
                )
                told.append(answer.choices[0].token_ids)
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
                messages += [{"role": "user", "content": f"and {turn}?"}]
            await shared.post(f"/v1/sessions/{name}/reward", body={"reward": len(name)}, cast_to=object)
            return name, told

        return dict(await asyncio.gather(*(agent(place) for place in range(number))))


def test_a_full_queue_says_when_to_come_again() -> None:
    with serving(max_requests=2) as served:
        (engine,) = served.engines
        engine.may_step.clear()
        with httpx.Client(timeout=60) as one:
            request = one.build_request("POST", served.url + "/v1/completions", json={"prompt": "a", "n": 3})
            assert one.send(request).status_code == 429
            body = {"prompt": "a", "n": 2, "stream": True}
            until(lambda: _is_refused_while(served, one, body))
            engine.may_step.set()


def _is_refused_while(served: Served, one: Any, body: dict[str, Any]) -> bool:
    """Whether a further request is refused while one is under way that takes all room."""
    (engine,) = served.engines
    held = threading.Thread(target=lambda: HTTP.post(served.url + "/v1/completions", json=body), daemon=True)
    held.start()
    until(lambda: engine.num_unfinished == 2)
    refused = one.post(served.url + "/v1/completions", json={"prompt": "a"})
    engine.may_step.set()
    held.join(60)
    return refused.status_code == 429 and refused.headers["retry-after"] == "1"


def test_who_goes_away_is_sampled_for_no_more() -> None:
    with serving(lambda request: [7] * 4000) as served:
        (engine,) = served.engines
        engine.pause_s = 0.01  # so that the server has time to see who has gone
        with httpx.stream("POST", served.url + "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            next(answer.iter_lines())
        until(lambda: len(engine.aborted) == 1)
        engine.may_step.clear()
        address, body = httpx.URL(served.url), b'{"prompt": "b"}'
        with socket.create_connection((address.host, address.port)) as asking:
            fields = f"Host: {address.host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            asking.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
            until(lambda: len(engine.requests) == 2)
        engine.may_step.set()
        until(lambda: len(engine.aborted) == 2 and not any(served.endpoint.engines.loads))


def test_an_engine_that_fails_is_told_to_whoever_waits_and_to_whoever_comes() -> None:
    def respond(request: Request) -> list[int]:
        raise RuntimeError("out of memory")

    with serving(respond) as served:
        answers = [HTTP.post(served.url + "/v1/completions", json={"prompt": "a"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert "engine 0 has failed: out of memory" in answers[1].json()["error"]["message"]
        assert HTTP.get(served.url + "/health").status_code == 503


def test_sessions_are_opened_seen_rewarded_once_and_dropped(served: Served) -> None:
    fields = {"session": "row", "prompt_index": 7, "sample_index": 3, "ground_truth": "4", "extra_info": {"k": 1}}
    opened = HTTP.post(served.url + "/v1/sessions", json=fields).json()
    assert opened == {"session": "row", "base_url": f"{served.url}/sessions/row/v1"}
    assert HTTP.post(served.url + "/v1/sessions", json=fields).status_code == 409
    assert HTTP.post(served.url + "/v1/sessions/row/reward", json={"reward": 1}).status_code == 409, "no turn yet"
    asked = openai.OpenAI(base_url=opened["base_url"], api_key="none", max_retries=0).chat.completions
    asked.create(model="m", messages=ASK)
    for wrong, words in (({"temperature": 0.5}, "leave temperature out"), ({"n": 2}, "one response to one prompt")):
        with pytest.raises(openai.BadRequestError, match=words):
            asked.create(model="m", messages=ASK, **wrong)
    assert HTTP.get(served.url + "/v1/sessions/row").json()["turns"] == 1
    nan = HTTP.post(
        served.url + "/v1/sessions/row/reward", content='{"reward": NaN}', headers={"Content-Type": "application/json"}
    )
    assert nan.status_code == 400
    given = HTTP.post(served.url + "/v1/sessions/row/reward", json={"reward": 0.5, "parts": {"style": 1}})
    assert given.json()["rows"] == 1
    rows, score = served.taken[-1]
    prompt = rows[0].prompt
    assert (prompt.index, rows[0].sample_index, prompt.ground_truth, prompt.extra_info["k"]) == (7, 3, "4", 1)
    assert (score.value, dict(score.parts)) == (0.5, {"style": 1.0})
    assert HTTP.post(served.url + "/v1/sessions/row/reward", json={"reward": 1}).status_code == 409
    with pytest.raises(openai.ConflictError):
        asked.create(model="m", messages=ASK)
    HTTP.post(served.url + "/v1/sessions", json={"session": "gone"})
    assert HTTP.delete(served.url + "/v1/sessions/gone").status_code == 200
    assert HTTP.get(served.url + "/v1/sessions/never").status_code == 404
    assert HTTP.post(served.url + "/v1/sessions", json={"session": "a/b"}).status_code == 400


def test_a_session_stays_with_its_engine_unless_that_has_more_to_do() -> None:
    assert [home_of(f"session-{i}", 4) for i in range(6)] == [3, 0, 1, 0, 0, 3]
    with serving(num_engines=4) as served:
        engines, name = served.endpoint.engines, "session-0"
        home = home_of(name, 4)
        assert engines.choose(name, 1) == home
        engines._threads[home].load = 2
        assert engines.choose(name, 1) == home
        engines._threads[home].load = 3
        assert engines.choose(name, 1) != home
        engines._threads[home].load = 0
