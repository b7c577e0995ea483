# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core on CPU: a GPT of 2 layers with Megatron's DDP and optimizer. WAY is "easy" for EasyCkpt's
calls, or "strategy" for dist_checkpointing's own save() and load()."""

from __future__ import annotations

import os

from report import RANK, WORLD_SIZE, die, digest, end, report


def main() -> None:
    import megatron_on_cpu

    megatron_on_cpu.apply()
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    import ropeteam.megatron as rm
    import ropeteam.torch

    steps, way = int(os.environ["STEPS"]), os.environ["WAY"]
    distributed = os.environ.get("DISTRIBUTED") == "1"
    die_at = int(os.environ.get("DIE_AT", "0"))
    dist.init_process_group("gloo")
    tensor_parallel = int(os.environ.get("TP", "1"))
    parallel.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        tensor_model_parallel_size=tensor_parallel,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    inner = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), inner
    )
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, min_lr=1e-3, use_distributed_optimizer=distributed, bf16=False, fp16=False
    )
    optimizer = get_megatron_optimizer(options, [model])
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-2, 1e-3, 2, 20, "cosine", 0.0, 0.0, 20, "constant")

    def train(step: int) -> float:
        x = (torch.arange(16) + step + parallel.get_data_parallel_rank()).view(1, 16) % 64
        mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(x, torch.arange(16).view(1, 16), mask, labels=(x + 1) % 64).float().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        return loss.item()

    def state(is_loading: bool) -> dict:
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
        made = {"model": inner.sharded_state_dict(metadata=metadata)}
        made["optimizer"] = optimizer.sharded_state_dict(made, is_loading=is_loading, metadata=metadata)
        return {**made, "scheduler": scheduler.state_dict(), "iteration": done}

    client = ropeteam.torch.open_distributed()
    done = 0
    if distributed and client.latest() is not None:
        train(0)  # without Apex, the distributed optimizer can load only after its first step
    if way == "easy":
        rm.initialize(client=client)
        done = rm.load_checkpoint([model], optimizer, scheduler, concat=os.environ.get("CONCAT") == "1")
    else:
        rm.register(client)
        directory = rm.restore(client, f"checkpoints-{RANK}")  # as on nodes without a shared disk
        if directory is not None:
            loaded = dist_checkpointing.load(state(True), directory, strict="raise_all")
            inner.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            scheduler.load_state_dict(loaded["scheduler"])
            done = loaded["iteration"]
    report(start=done, weights=digest(inner.state_dict()))
    while done < steps:
        loss = 0.0 if os.environ.get("FROZEN") else train(done + 1)
        scheduler.step(1)
        done += 1
        report(step=done, loss=loss)
        if done == die_at:
            client.wait(done - 1, timeout=60)
            if RANK == WORLD_SIZE - 1:
                ropeteam.Client.begin = lambda *arguments, **options: die()
        if way == "easy":
            assert rm.save_checkpoint_if_needed(done, [model], optimizer, scheduler)
        else:
            directory = os.path.abspath(f"checkpoints-{RANK}/iter_{done:07d}")
            os.makedirs(directory, exist_ok=True)
            dist_checkpointing.save(state(False), directory, rm.BACKEND)
    client.wait(steps, timeout=60)
    if way == "easy":
        assert rm.save_checkpoint_done()
    report(digest=digest(inner.state_dict()))
    dist.barrier()
    end()


if __name__ == "__main__":  # Megatron may start processes that import this
    main()
