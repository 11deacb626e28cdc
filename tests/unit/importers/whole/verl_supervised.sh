# Supervised, through torchrun, with experts over two nodes.
torchrun --nnodes=2 --nproc_per_node=8 -m verl.trainer.sft_trainer \
    data.train_files=$HOME/data/train.parquet data.micro_batch_size_per_gpu=2 data.max_length=4096 \
    model.path=Qwen/Qwen3-30B-A3B optim.lr=1e-5 engine.tensor_model_parallel_size=2 \
    engine.expert_model_parallel_size=16 engine.expert_tensor_parallel_size=1 engine.pipeline_model_parallel_size=1 \
    checkpoint.save_contents=[model,optimizer,extra] trainer.total_epochs=2
