"""Real sharded checkpoints: FSDP2 over gloo ranks on the CPU, saved as axolotl does."""

from __future__ import annotations

import os

import torch
from torch import distributed as dist

SHAPES = {  # of the tiny models that are sharded
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}


def make_config(family, **changes):
    from transformers import AutoConfig  # noqa: PLC0415 - in the ranks' processes

    extra = {
        "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
        "llama": {"tie_word_embeddings": False},
        "qwen3_moe": {
            "head_dim": 16,
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    }[family]
    return AutoConfig.for_model(family, **SHAPES | extra | changes)


LAYOUTS = {"qwen3": "axolotl", "llama": "bare", "qwen3_moe": "one"}


def save_sharded(rank, size, port, folder):
    """One rank: a model of each family, trained two steps, saved sharded in its layout."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    for family, layout in LAYOUTS.items():
        _save(rank, size, folder / family, family, layout)
    dist.destroy_process_group()


def _save(rank, size, folder, family, layout):
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - in the ranks' processes
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415 - as above
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - as above
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - as above
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - as above

    torch.manual_seed(0)
    config = make_config(family)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        torch.manual_seed(step)
        ids = torch.randint(0, 384, (2, 12))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = get_model_state_dict(model)
    moments = get_optimizer_state_dict(model, optimizer)
    if layout == "axolotl":
        place = folder / "checkpoint-2"
        dcp.save({"model": weights}, checkpoint_id=place / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": moments}, checkpoint_id=place / "optimizer_0")
    elif layout == "one":
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder / "step-2")
    else:  # the model's state dict itself, nothing around it
        dcp.save(weights, checkpoint_id=folder / "step-2")
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=whole)
    state = get_optimizer_state_dict(model, optimizer, options=whole)
    if rank == 0:
        config.save_pretrained(folder)
        kept = {"weights": full, "state": state["state"]}
        torch.save(kept, folder / "reference.pt")
    dist.barrier()
