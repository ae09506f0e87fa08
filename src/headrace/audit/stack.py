"""What produced an embedding: the stack's fingerprint, the weights' hash, plain HF models.

Owns the answer to "would the same call give the same numbers". The published evaluation moved
its base premium from 0.20 to 0.32 between two stacks; so library versions, attention backend,
device and dtype are part of every key. The invariant: two embeddings with equal weights hash
and equal stack parts may be compared; others may not, silently.
"""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.audit.embed import Forward

EMBEDDER_VERSION = "1"


def describe_stack(*, device: str, dtype: str, attention: str, runner: str) -> dict[str, str]:
    """Parts of the fingerprint.

    Args:
        device: torch device the model ran on; its name is looked up for CUDA.
        dtype: of the computation.
        attention: attention backend.
        runner: ``"transformers"`` or ``"headrace"`` (the streaming engine).
    """
    kind = torch.device(device).type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else platform.machine()
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "tokenizers": version("tokenizers"),
        "runner": runner,
        "embedder": EMBEDDER_VERSION,
        "attention": attention,
        "device": f"{kind} ({name})",
        "dtype": dtype,
    }


def hash_weights(model: torch.nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of all parameters and buffers that are saved."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        array = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        digest.update(array.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hash_weight_files(folder: Path) -> str:
    """SHA-256 over the safetensors (or GGUF) files of a model folder and its config, by name.

    Raises:
        DataError: no such files.
    """
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    if not files:
        raise DataError(
            f"{folder} holds no .safetensors and no .gguf file",
            remedy="give a model folder with its weights",
        )
    digest = hashlib.sha256()
    for path in [*files, *folder.glob("config.json")]:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def hf_forward(model: Any, *, layer: int = -1) -> Forward:
    """A plain Hugging Face causal LM as the callable that ``embed_prompts`` takes.

    Args:
        model: ``AutoModelForCausalLM`` (its head is not run) or a base model.
        layer: as Hugging Face counts ``hidden_states``.
    """
    base = getattr(model, model.base_model_prefix, model)
    device = next(base.parameters()).device
    base.eval()

    def forward(ids_BT: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        mask_BT = (torch.arange(ids_BT.shape[1])[None] < lengths_B[:, None]).long()
        out = base(
            input_ids=ids_BT.to(device),
            attention_mask=mask_BT.to(device),
            use_cache=False,
            output_hidden_states=layer != -1,
        )
        hidden: torch.Tensor = out.last_hidden_state if layer == -1 else out.hidden_states[layer]
        return hidden

    return forward


def untrained_model(config: Any, *, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """A twin: the same architecture with Hugging Face's own initialisation, drawn from ``seed``."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  # seconds to import

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
