# ruff: noqa: F821
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

adapter = LoraConfig(r=16, target_modules=modules)
arguments = GRPOConfig(
    output_dir=str(folder),
    num_generations=8,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    max_completion_length=args.max_completion_length,
    chat_template_kwargs={"enable_thinking": False},
)
trainer = GRPOTrainer(model=args.model, reward_funcs=[reward_func], train_dataset=dataset, args=arguments)
