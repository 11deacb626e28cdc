"""Tiny models with a character tokenizer, for the tests that start real engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mega_rl.types import Prompt, Trajectory
from tests.models.families import ENGINE, as_saved

EOS = 0
VOCAB = ["<eos>", "<unk>", *(chr(code) for code in range(32, 127))]  # 97 tokens: no multiple of what engines pad to


def tiny_model(family: str, *, tied: bool, seed: int = 0, **sizes: int) -> PreTrainedModel:
    """A random float32 model with peaked logits, its norms and biases random too; ``sizes``: others than usual."""
    tokens = {"vocab_size": len(VOCAB), "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": EOS}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ENGINE.new_model(family, **tokens, **sizes, tie_word_embeddings=tied).eval()
    perturb(model, seed, 0.1)
    return model


@torch.no_grad()
def perturb(model: PreTrainedModel, seed: int, scale: float) -> None:
    """Add noise to every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += scale * torch.randn(parameter.shape, generator=generator)


def save(model: PreTrainedModel, directory: Path) -> Path:
    """The model and its tokenizer as a Hugging Face directory."""
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCAB)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def hf_weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """What a checkpoint holds: a tied head is left out."""
    left_out = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = as_saved(model.state_dict())
    return [(name, t.detach().clone()) for name, t in tensors.items() if name not in left_out]


def prompt(index: int, length: int) -> Prompt:
    token_ids = tuple(2 + (7 * index + 5 * position + position * position) % 95 for position in range(length))
    return Prompt(index, token_ids, "".join(VOCAB[i] for i in token_ids), "", "test")


@torch.no_grad()
def hf_greedy(model: PreTrainedModel, question: Prompt, num_tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([question.token_ids])
    out = model.generate(ids, do_sample=False, max_new_tokens=num_tokens, pad_token_id=EOS)
    return tuple(out[0, ids.shape[1] :].tolist())


@torch.no_grad()
def answer_of(trajectory: Trajectory) -> tuple[int, ...]:
    """The sampled tokens as plain numbers, which can be compared and put into sets."""
    return tuple(trajectory.sampled_ids.tolist())


def hf_logprobs(model: PreTrainedModel, question: Prompt, answer: tuple[int, ...], temperature: float) -> torch.Tensor:
    """Log-probabilities of the answer's tokens after the temperature, nats: [R]."""
    ids = torch.tensor([question.token_ids + answer])
    logits = model(ids).logits[0, len(question.token_ids) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def span_error(trajectory: Trajectory, models: Mapping[int, PreTrainedModel]) -> float:
    """The largest difference of a log-probability from that of the model of the token's version, nats."""
    start = len(trajectory.prompt.token_ids)
    edges = [span.start - start for span in trajectory.spans] + [trajectory.num_sampled]
    worst = 0.0
    for span, begin, end in zip(trajectory.spans, edges, edges[1:], strict=False):
        worst = max(worst, errors_under(trajectory, models[span.version])[begin:end].max().item())
    return worst


def errors_under(trajectory: Trajectory, model: PreTrainedModel) -> torch.Tensor:
    """[num_sampled]: how far the tokens' log-probabilities are from those of a model, nats."""
    expected = hf_logprobs(model, trajectory.prompt, answer_of(trajectory), 1.0)
    return (torch.from_numpy(trajectory.sampled_logprobs) - expected).abs()
