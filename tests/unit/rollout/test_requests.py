"""Seeds, requests, and trajectories out of the engine's answers."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mega_rl.rollout.engine import Request
from mega_rl.rollout.requests import make_requests, sample_seed, text_of, trajectory_of_output
from mega_rl.types import Prompt, Span


def prompt(index: int) -> Prompt:
    return Prompt(index, (1, 2, 3), "1+2", "3", "arithmetic")


def answer(**changes: object) -> SimpleNamespace:
    flat = SimpleNamespace(logprobs=[-0.5, -1.25])
    fields = {"token_ids": [5, 7], "logprobs": flat, "text": "ab", "finish_reason": "stop", **changes}
    return SimpleNamespace(outputs=[SimpleNamespace(**fields)])


def test_seed_is_stable() -> None:
    assert sample_seed(0, 0, 0, 0) == 3534985023247476039
    assert sample_seed(1, 2, 3, 4) == 2463371502700119778


def test_every_coordinate_changes_the_seed_and_they_do_not_mix() -> None:
    seeds = {sample_seed(a, b, c, d) for a in range(4) for b in range(4) for c in range(12) for d in range(12)}
    assert len(seeds) == 4 * 4 * 12 * 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, 1, 11, 1) != sample_seed(0, 11, 1, 1)


def test_requests_are_in_order_and_do_not_depend_on_the_batch() -> None:
    requests = make_requests([prompt(4), prompt(2)], n=3, step=7, seed=1, max_tokens=20, temperature=0.8)
    assert [(r.prompt.index, r.sample_index) for r in requests] == [(4, 0), (4, 1), (4, 2), (2, 0), (2, 1), (2, 2)]
    assert requests[3:] == make_requests([prompt(2)], n=3, step=7, seed=1, max_tokens=20, temperature=0.8)
    assert requests[1].seed == sample_seed(1, 7, 4, 1)
    assert (requests[0].max_tokens, requests[0].temperature, requests[0].greedy) == (20, 0.8, False)


def test_temperature_zero_is_greedy() -> None:
    (request,) = make_requests([prompt(0)], n=1, step=0, seed=0, max_tokens=1, temperature=0.0)
    assert request.greedy


def test_trajectory() -> None:
    trajectory = trajectory_of_output(Request(prompt(3), 2, 0, 8), answer(), version=6)
    assert (trajectory.prompt.index, trajectory.sample_index, trajectory.spans) == (3, 2, (Span(3, 6),))
    assert trajectory.token_ids.tolist() == [1, 2, 3, 5, 7] and trajectory.logprobs.tolist() == [0, 0, 0, -0.5, -1.25]
    assert (trajectory.text, trajectory.finish_reason) == ("ab", "stop")


def test_the_experts_of_all_tokens_but_the_last() -> None:
    request = Request(prompt(3), 2, 0, 8, with_routing=True)
    experts = np.zeros((4, 2, 2), np.uint8)
    trajectory = trajectory_of_output(request, answer(), 6, experts)
    assert trajectory.routed_experts is experts
    with pytest.raises(RuntimeError, match="the experts of 5 tokens of prompt 3, sample 2, which had 4 as inputs"):
        trajectory_of_output(request, answer(), 6, np.zeros((5, 2, 2), np.uint8))


@pytest.mark.parametrize("changes", [{"finish_reason": "abort"}, {"finish_reason": None}])
def test_unfinished_answers_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RuntimeError, match="prompt 3, sample 2"):
        trajectory_of_output(Request(prompt(3), 2, 0, 8), answer(**changes), version=0)


def test_broken_weights_are_named() -> None:
    with pytest.raises(RuntimeError, match="weights of version 4"):
        trajectory_of_output(
            Request(prompt(3), 2, 0, 8), answer(logprobs=SimpleNamespace(logprobs=[float("nan"), -1.0])), version=4
        )


def test_log_probabilities_that_were_not_asked_for_are_0() -> None:
    request = Request(prompt(3), 2, 0, 8, with_logprobs=False)
    trajectory = trajectory_of_output(request, answer(logprobs=None), version=6)
    assert trajectory.sampled_ids.tolist() == list(answer().outputs[0].token_ids) and not trajectory.logprobs.any()


@pytest.mark.parametrize("marks", ["spaces", "words"])
@pytest.mark.parametrize("text", ["the quick brown fox", " leading", "no", "", "déjà vu, 算一下"])
def test_the_text_of_a_response_is_what_it_adds_to_the_prompt(marks: str, text: str) -> None:
    kinds = {
        "spaces": (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
        "words": (pre_tokenizers.Metaspace(), decoders.Metaspace()),  # loses the space before a first word
    }
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = kinds[marks]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox leading no déjà vu, 算一下 question: answer"] * 4, trainer)
    prompt_ids, ids = tokenizer.encode("question:").ids, tokenizer.encode(text).ids
    both = tokenizer.decode(prompt_ids + ids)
    for before in (prompt_ids, prompt_ids * 9):
        assert "question:" + text_of([*before, *ids], len(before), "length", tokenizer.decode) == both
    assert text_of(ids, 0, "length", tokenizer.decode) == tokenizer.decode(ids)
    assert text_of([*prompt_ids, *ids, 0], len(prompt_ids), "stop", tokenizer.decode) == both.removeprefix("question:")


def test_the_package_does_not_import_vllm() -> None:
    modules = "mega_rl.rollout.vllm.engine, mega_rl.rollout.collect.replicas, mega_rl.rollout.requests"
    code = f"import sys, {modules}; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
