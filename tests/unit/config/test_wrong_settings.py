"""Settings that are wrong by themselves, or with the model and the number of processes: each is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.config import load_config, validate
from mega_rl.errors import InputError
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model

CONFIG = """
model: {{path: {model}}}
data: {{train_files: [{data}], max_prompt_length: 8, max_response_length: 8}}
rewards: [{{name: exact_match}}]
trainer: {{output_dir: {output_dir}, total_steps: 2}}
platform: {{name: cpu}}
"""
PPO, LORA, DPO = "algorithm.name=ppo", "tuning.method=lora", "trainer.stage=dpo rewards=[]"
WRONG = f"""
rewards=[]
rewards=[{{name:''}}]
rewards=[{{name:':f'}}]
rewards=[{{name:'gone.py:f'}}]
rewards=[{{name:exact_match,weight:.nan}}]
rewards=[{{name:exact_match}},{{name:exact_match}}]
rewards=[{{name:model}}]
rewards=[{{name:model,options:{{path:/gone}}}}]
reward_workers.num_workers=100000
reward_workers.num_workers=0
reward_workers.memory_bytes=1
reward_workers.timeout_s=.nan
trainer.output_dir=/dev/null
trainer.output_dir=/dev/null/x
trainer.output_dir=/proc/x
trainer.output_dir=/
trainer.output_dir=~/runs
checkpoint.resume=/etc
checkpoint.grace_s=.inf
checkpoint.local=-1
rollout.replay=/etc
rollout.kv_cache_bytes=1
rollout.n=1
rollout.n=100000
rollout.num_engines=2
rollout.stop_token_ids=[99999]
rollout.stop=['']
rollout.adapter=slots
aqn.seed=-1
aqn.exclude_patterns=['[']
aqn.sigma_start=.inf
optimizer.lr=1e30
optimizer.clip_grad=.inf
optimizer.decay_steps=5
optimizer.warmup_steps=10
platform.num_threads=1000000
data.train_batch_size=1000000
data.train_files=[/dev/null]
data.mask_spans=[[a,b]]
algorithm.entropy_coefficient=-3
algorithm.importance_floor=5
algorithm.dynamic_sampling.budget=0.5
critic.path=/gone
{PPO} critic.path=/gone
{PPO} critic.path=/etc
{PPO} critic.lr=.nan
{PPO} critic.gamma=1.5
{PPO} critic.lam=-0.1
{PPO} critic.clip_value=0
{PPO} critic.warmup_steps=2
{PPO} critic.shares_base=true
tuning.method=qlora
tuning.also_train=[norm.weight]
tuning.adapter.path=/etc
tuning.method=freeze tuning.train_layers=0
{LORA} tuning.adapter.rank=0
{LORA} tuning.adapter.rank=100000
{LORA} tuning.adapter.alpha=.nan
{LORA} tuning.adapter.path=/dev/null
{LORA} tuning.adapter.path=/etc
{LORA} tuning.adapter.new=true
memory.offload=[weights,weights]
memory.offload=[Optimizer]
memory.optimizer_on_host=true memory.offload=[optimizer]
memory.optimizer_state_dtype=float16
memory.recompute_modules=[mlp]
memory.recompute=selective memory.recompute_modules=[]
memory.recompute=selective memory.recompute_modules=[moe]
memory.recompute=selective memory.recompute_modules=[mlp,shared_experts]
memory.recompute=full memory.recompute_num_layers=4
trainer.profile.steps=[0]
trainer.profile.steps=[1,3]
trainer.profile.steps=[1] trainer.profile.ranks=[]
trainer.profile.steps=[1] trainer.profile.ranks=[0,2]
trainer.profile.ranks=[-1]
trainer.gates.engine=0
trainer.gates.disabled=[engine,engine]
trainer.megatron={{attention_dropout:7}}
parallel.tensor=3
parallel.virtual_pipeline=2
parallel.expert=2
{DPO} preference.beta=.nan
{DPO} preference.loss=hinge preference.label_smoothing=0.2
{DPO} preference.loss=simpo preference.reference=cached
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wrong")
    spec = TinyModelSpec(hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=1, ffn=8)
    model = write_tiny_model(root / "model", spec, arithmetic_tokenizer())
    data = root / "train.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    file = root / "run.yaml"
    file.write_text(CONFIG.format(model=model, data=data, output_dir=root / "run"))
    return file


def test_what_they_are_compared_with_is_right(config: Path) -> None:
    for overrides in ([], [PPO], [LORA], DPO.split()):
        validate(load_config(config, overrides), 2)


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_a_wrong_setting_is_one_sentence_that_names_it(config: Path, line: str) -> None:
    overrides = [word.replace(":", ": ") for word in line.split(" ")]
    with pytest.raises(InputError) as caught:
        validate(load_config(config, overrides), 2)
    named = overrides[-1].partition("=")[0]
    assert named in str(caught.value) and len(str(caught.value)) < 2000
