"""What a training file means to ``headrace plan``: the job of a checked configuration.

Owns which keys change bytes, time or money. The invariant: every key of a training file and of
``engine:`` is read here or is named in :data:`NO_EFFECT`, so that none is passed over in silence.
Needs no torch, but for parameters that only a model's structure can count.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from headrace.data.estimate import BYTES_A_TOKEN, epoch_tokens
from headrace.errors import ConfigError, HeadraceError
from headrace.models.lora import ALL_LINEAR
from headrace.plan.job import Job, Trained
from headrace.trainer.aliases import override_aliases, translate, translate_data
from headrace.trainer.config import checked
from headrace.trainer.config_file import apply_override, read_yaml
from headrace.units import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.plan.source import ModelSource
    from headrace.trainer.config import TrainConfig

_REPLACED = ("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "fsdp_final_state_dict_type")
_NO_DATA = "(no data)"
# Keys that mean nothing without data.
_OF_DATA = frozenset(
    {
        "datasets", "eval_datasets", "val_set_size", "eval_strategy", "eval_steps",
        "early_stopping_patience", "train_on_inputs", "chat_template_kwargs",
    }
)  # fmt: skip

# Keys that change no byte, second or step count that a plan gives; the others are read below.
NO_EFFECT = frozenset(
    {
        # names, places, randomness, what is shown
        "seed", "data_seed", "output_dir", "overwrite_output_dir", "run_name", "report_to",
        "progress", "logging_steps", "data_cache_dir", "dataset_num_proc", "chat_template",
        "eos_token", "special_tokens", "trust_remote_code", "shuffle", "resume_from_checkpoint",
        "requeue",
        # the optimizer's numbers, not its size
        "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
        "warmup_ratio", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
        "param_groups", "router_aux_loss_coef", "lora_alpha", "lora_dropout", "peft_use_rslora",
        "peft_init_lora_weights",
        # evaluations take no more memory than a step; their time is not planned
        "eval_datasets", "per_device_eval_batch_size", "eval_strategy", "eval_steps",
        "lm_eval_tasks", "lm_eval_limit", "lm_eval_include_path", "early_stopping_patience",
        "loss_watchdog_threshold", "loss_watchdog_patience",
        # rows are planned full
        "packing_strategy", "excess_length", "pad_to_multiple_of", "dataloader_drop_last",
        # of engine: pieces of what is counted, checks, and what is written beside
        "chunk_bytes", "update_threads", "update_order", "compile_backend", "deterministic",
        "lane_timeout_seconds", "poison_slots", "lane_jitter_seconds", "trace",
    }
)  # fmt: skip


def resolve_for_plan(
    path: Path, overrides: Sequence[str], model: str | None
) -> tuple[TrainConfig, list[str]]:
    """A training file, checked as ``headrace train`` does, but for what a plan can do without.

    Data may be missing, and so may ``output_dir``; what headrace replaces (DeepSpeed, FSDP) is not
    looked at.

    Args:
        path: of the file.
        overrides: ``key=value``, as for ``headrace train``.
        model: in place of the file's.

    Raises:
        ConfigError: no model is named, or a key is unknown or wrong.
    """
    raw = read_yaml(path)
    replaced = [key for key in _REPLACED if raw.pop(key, None)]
    if model is not None:
        overrides = [*overrides, f"model_name_or_path={json.dumps(model)}"]
    for override in overrides:
        override_aliases(raw, override.partition("=")[0])
        apply_override(raw, override)
    if model is not None:
        raw.pop("model_config", None)
    translated, notes = translate(raw)
    notes += [f"{key} -> not looked at (headrace replaces it)" for key in replaced]
    if not (translated.get("model_name_or_path") or translated.get("model_config")):
        raise ConfigError(
            "no model is named",
            remedy="give --model NAME_OR_FOLDER, or a YAML with model_name_or_path; "
            "'headrace plan --list-models' shows what is shipped",
        )
    try:
        translate_data(raw, translated, notes)
    except HeadraceError as error:
        notes.append(f"planned without its data: {error.message}")
        translated.pop("datasets", None)
    if not translated.get("datasets"):
        translated = {key: v for key, v in translated.items() if key not in _OF_DATA}
        translated["datasets"] = [{"path": _NO_DATA}]
    translated.setdefault("output_dir", ".")
    return checked(translated), notes


def plan_job(config: TrainConfig, source: ModelSource, *, num_gpus: int, cpu: bool) -> Job:
    """The job of a training file, without what its data says.

    Args:
        config: checked.
        source: the model's configuration.
        num_gpus: cards that share a step.
        cpu: the machine has none.
    """
    engine = config.engine
    rows = config.per_device_train_batch_size
    steps = config.gradient_accumulation_steps
    cut = min(rows, engine.rows_per_micro_batch or rows)
    micro_batches = steps * -(-rows // cut)
    # On a card the trainer chooses what is left open; on a CPU there is nothing to choose.
    chosen = cpu or engine.recompute_layers is not None or engine.offload_layers is not None
    free = engine.activations == "keep" and not chosen
    waves = None
    if engine.micro_batches_per_wave is not None or cpu:
        waves = -(-micro_batches // (engine.micro_batches_per_wave or micro_batches))
    rank, trained = _trained(config, source)
    return Job(
        max_length=config.max_length,
        micro_batch=cut,
        tokens_per_step=micro_batches * cut * config.max_length * num_gpus,
        accumulation=steps,
        dtype=config.dtype,
        clipping=engine.clipping if config.max_grad_norm else "off",
        activations=None if free else engine.activations,
        recompute_layers=engine.recompute_layers or 0,
        offload_layers=engine.offload_layers or 0,
        device_units=engine.device_units,
        expert_slices=engine.expert_slices or (1 if cpu else None),
        gradient_bytes={"float32": 4, "bfloat16": 2, None: None}[engine.gradient_dtype],
        compiled=engine.compile is not False,
        waves=waves,
        weight_slots=engine.weight_slots,
        gradient_slots=engine.gradient_slots,
        loss_chunk_tokens=engine.loss_chunk_tokens,
        async_save=config.async_save,
        save_bytes=config.async_save_memory,
        lora_rank=rank,
        trained=trained,
    )


def run_length(
    config: TrainConfig, tokens_per_step: int, num_tokens: int | None
) -> tuple[int | None, int, list[str]]:
    """Tokens of the run, checkpoints it keeps, and how they were found.

    Args:
        config: checked.
        tokens_per_step: of the global batch, rows full.
        num_tokens: from the command line, before what the file says.
    """
    notes = []
    if num_tokens is None and config.max_steps > 0:
        num_tokens = config.max_steps * tokens_per_step
    elif num_tokens is None and (found := epoch_tokens(config.datasets)) is not None:
        tokens, counted = found
        held_out = config.val_set_size if config.val_set_size < 1 else 0
        num_tokens = round(config.num_train_epochs * tokens * (1 - held_out))
        how = "counted" if counted else f"estimated at {BYTES_A_TOKEN} bytes of text a token"
        notes.append(
            f"an epoch has about {format_count(tokens)} tokens ({how}); num_train_epochs "
            f"{config.num_train_epochs:g}"
        )
    elif num_tokens is None:
        notes.append(
            "the length of an epoch is not known, so hours are not given: --tokens says it"
        )
    if config.gguf_file or str(config.model_name_or_path).endswith(".gguf"):
        notes.append("GGUF weights take 4 bytes a parameter more while they are read")
    if not config.packing:
        notes.append("packing: false: rows are planned full; shorter documents take less")
    saves = _num_saves(config, num_tokens, tokens_per_step)
    if saves is None:
        notes.append("the number of checkpoints is not known; room for one is planned")
    limit = config.save_total_limit
    kept = 1 if saves is None and limit is None else min(saves or limit or 1, limit or saves or 1)
    return num_tokens, kept, notes


def _num_saves(config: TrainConfig, num_tokens: int | None, tokens_per_step: int) -> int | None:
    if config.save_strategy == "no":
        return 1
    if config.save_strategy == "epoch":
        return math.ceil(config.num_train_epochs) if config.max_steps < 0 else None
    if config.save_steps < 1:
        return math.ceil(1 / config.save_steps)
    if num_tokens is None:
        return None
    return math.ceil(math.ceil(num_tokens / tokens_per_step) / config.save_steps)


def _trained(config: TrainConfig, source: ModelSource) -> tuple[int | None, Trained | None]:
    """The rank of adapters on every linear layer; else what is trained, if not everything."""
    settings = None if config.lora_model_dir else config.lora_settings()
    if config.adapter is None and not (config.unfrozen_parameters or config.frozen_parameters):
        return None, None
    if (
        settings is not None
        and settings.target_modules == ALL_LINEAR
        and not settings.target_parameters
        and settings.layers is None
        and not settings.modules_to_save
    ):
        return settings.rank, None
    return None, _counted(config, source)


def _counted(config: TrainConfig, source: ModelSource) -> Trained:
    """Counted in the model's structure, which torch builds without memory."""
    from transformers import AutoConfig  # noqa: PLC0415 - seconds

    from headrace.trainer.model_checks import take_apart  # noqa: PLC0415 - torch, seconds
    from headrace.trainer.model_config import usable  # noqa: PLC0415 - as above

    with usable(source.origin):
        spec = take_apart(config, AutoConfig.for_model(**source.config))
    counts = [unit.num_trainable_parameters for unit in spec.units]
    added = sum(p.numel for unit in spec.units for p in unit.params if p.adapter)
    return Trained(
        total=sum(counts),
        added=added,
        largest_layer=max(counts[1:-1]),
        embedding=counts[0],
        head=counts[-1],
        first_layer=spec.first_trained_layer,
        adapts_experts=bool(spec.adapters is not None and spec.adapters.parameters),
    )
