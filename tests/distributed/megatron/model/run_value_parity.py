"""Started by torchrun: the engine with a value head against transformers' ``*ForSequenceClassification``, on two ranks.

Prints one line of JSON after ``VALUES`` per family and layout on rank 0: figure -> [largest error, where it is]. Also
exports, and loads a language model with a new head; what is read back is compared bit for bit, and every layout goes on
from one checkpoint. Gradients and optimizer take the bytes of the memory plan.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader, value_changes
from mega_rl.bridge.mapping.tensors import SCORE
from mega_rl.bridge.slices import whole_box
from mega_rl.data.packing import pack, unpack
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.model.value import NewScore
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.microbatch import Figures, Microbatch, Sequence
from mega_rl.models.shape import read_model_shape, value_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.stages.models.trainer import trainer_spec
from mega_rl.stages.weights.export import export_huggingface
from tests.distributed.megatron.run_engine_parity import Errors, compare_gradients
from tests.distributed.megatron.tuning.run_tuning_parity import check_state
from tests.models import tiny_models
from tests.models.engine_support import groups, own_device, run_config, total_loss
from tests.models.families import as_saved
from tests.models.layouts import Case
from tests.models.parity_reference import OBJECTIVES

LENGTHS = ((7, 19), (30, 4), (12, 12), (5, 41))  # tokens of the two answers of each pair
PAD = 0
WITH_FILES = ("qwen2", "deepseek_v3")  # families whose exports and checkpoints are looked at


def reward_model(family: str) -> transformers.PreTrainedModel:
    base = tiny_models.make(family)
    config = base.config
    config.num_labels, config.pad_token_id = 1, PAD
    model = getattr(transformers, type(base).__name__.replace("CausalLM", "SequenceClassification"))(config).eval()
    model.model.load_state_dict(base.model.state_dict())
    torch.manual_seed(9)
    torch.nn.init.normal_(model.score.weight, std=0.25)  # values of order 1
    return model


def answers(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, vocab_size, (n,), generator=generator) for pair in LENGTHS for n in pair]


def bradley_terry(values: Tensor) -> Tensor:
    chosen, rejected = values.view(-1, 2).unbind(1)
    return -F.logsigmoid(chosen - rejected).sum() / len(LENGTHS)


def build(case: Case, layout: ParallelLayout, shape: Any, weights: Any) -> MegatronEngine:
    config = run_config(case, OBJECTIVES["sft"])
    policy = MegatronPolicy(trainer_spec(config), shape, layout, own_device())
    return MegatronEngine(policy, weights, Optimization(config.optimizer, 10, 5))


def check(case: Case, layout: ParallelLayout, family: str, directory: Path) -> None:
    model, errors = reward_model(family), Errors()
    ids = answers(model.config.vocab_size)
    with torch.no_grad():
        expected = [model.score(model.model(input_ids=row[None]).last_hidden_state)[0, :, 0] for row in ids]
    loss = bradley_terry(torch.stack([model(input_ids=row[None]).logits[0, 0] for row in ids]))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    gradients = as_saved(gradients)
    norm = float(torch.sqrt(torch.stack([g.square().sum() for g in gradients.values()]).sum()))

    shape = read_model_shape(directory / family, allowed=["value"])
    engine = build(case, layout, shape, HFReader(directory / family))
    # One position more than predictions: the last token's value is what counts.
    sequences = [Sequence(torch.cat([row, row[-1:]]), torch.ones(len(row))) for row in ids]
    data, num_data = layout.coordinates(dist.get_rank()).data, layout.data
    own = [i for pair in range(data, len(LENGTHS), num_data) for i in (2 * pair, 2 * pair + 1)]
    half = len(own) // 2
    parts = [own[:half], own[half:]]
    microbatches = [pack(sequences, part, 4 * case.tensor, PAD).to(own_device()) for part in parts]
    for m, values in zip(microbatches, engine.policy.token_values(microbatches), strict=True):
        for index, found in zip(m.sequence_indices, unpack(values, m), strict=True):
            errors.note("values", float((found - expected[index]).abs().max()), f"sequence {index}")

    def share(values_T: Tensor, m: Microbatch) -> tuple[Tensor, Figures]:
        return bradley_terry(torch.stack([v[-1] for v in unpack(values_T, m)])), Figures()

    reports = engine.forward_backward(microbatches, share)
    errors.note("loss", abs(total_loss(layout, reports) - float(loss)))
    compare_gradients(engine, gradients, errors)
    errors.note("norm", abs(engine.optimizer_step().grad_norm - norm) / norm)
    check_state(engine, run_config(case, OBJECTIVES["sft"]), shape, layout)
    figures = errors.of_all_ranks()
    if dist.get_rank() == 0:
        line = json.dumps({"layout": case.name, "family": family, "errors": figures})
        print(f"VALUES {line}\n", end="", flush=True)


def check_files(case: Case, layout: ParallelLayout, family: str, directory: Path) -> None:
    """A language model gets a new head; its export is a reward model to transformers, with the engine's values."""
    source, target = directory / f"{family}_language", directory / f"{family}_{case.name}"
    shape = value_shape(read_model_shape(source))
    engine = build(case, layout, shape, NewScore(HFReader(source), shape.hidden_size, seed=5))
    export_huggingface(engine, target, source, 1 << 20, value_changes(shape, PAD))
    check_checkpoint(engine, directory / f"{family}_checkpoints")
    row = answers(shape.vocab_size)[3]
    microbatch = pack([Sequence(torch.cat([row, row[-1:]]), torch.ones(len(row)))], [0], 4 * case.tensor, PAD)
    (values,) = engine.policy.token_values([microbatch.to(own_device())])
    read, written = HFReader(source), HFReader(target)
    assert SCORE in written.names() and "lm_head.weight" not in written.names()
    for name in read.names():
        if name != "lm_head.weight":
            box = whole_box(read.shape(name))
            assert torch.equal(read.read(name, box), written.read(name, box)), name
    score = NewScore(read, shape.hidden_size, seed=5).read(SCORE, whole_box((1, shape.hidden_size)))
    assert torch.equal(written.read(SCORE, whole_box(score.shape)), score) and float(score.std()) > 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(target, dtype=torch.float32).eval()
    batch = torch.stack([row, torch.cat([row[:-2], torch.tensor([PAD, PAD])])])  # the second one ends before
    with torch.no_grad():
        found = model(input_ids=batch, attention_mask=batch != PAD).logits[:, 0]
    wanted = torch.stack([values[len(row) - 1], values[len(row) - 3]])
    assert torch.allclose(found, wanted, atol=2e-5), (found, wanted)
    if dist.get_rank() == 0:
        print(f"EXPORTED {family} {case.name}\n", end="", flush=True)


def check_checkpoint(engine: MegatronEngine, root: Path) -> None:
    """The first layout of a family writes one; the others go on from it."""
    dist.barrier()
    if root.exists():
        with torch.no_grad():
            for weight in (*engine.policy.parameters.values(), *engine.policy.frozen.values()):
                weight.fill_(7.0)
        checkpoint.load(checkpoint.directory_of(root, 1), engine)
    else:
        dist.barrier()
        writer = CheckpointWriter(root, 0, is_async=False)
        writer.save(1, engine, {"data": {}, "validations": {}})
        writer.finish()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=json.loads, required=True, help="JSON list of the arguments of Case")
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    transformers.utils.logging.disable_progress_bar()  # it would stand in the same line as what is printed
    cases = [Case(**keys) for keys in arguments.cases]
    if dist.get_rank() == 0:
        for family in {family for case in cases for family in case.families}:
            reward_model(family).save_pretrained(arguments.dir / family)
            tiny_models.make(family).save_pretrained(arguments.dir / f"{family}_language")
    dist.barrier()
    for case in cases:
        with groups(case) as layout:
            for family in case.families:
                check(case, layout, family, arguments.dir)
            if case.tensor * case.pipeline > 1 and case.virtual_pipeline is None:
                for family in (family for family in WITH_FILES if family in case.families):
                    check_files(case, layout, family, arguments.dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
