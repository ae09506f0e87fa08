"""Host memory of a training run: peak RSS against state + activations + runtime.

A Llama-shaped model of 135M parameters (the shape of SmolLM2-135M) with random weights trains a
few steps on random tokens, on the CPU, through ``headrace.trainer.train``. What it is compared
with is measured apart, in processes of their own:

- runtime: resident memory after importing the trainer, before anything is allocated;
- state: 12 bytes a parameter, as the run's own record says (alignment apart);
- activations: what plain autograd saves for the backward pass of one micro-batch of the same
  model in float32, parameters not counted.

Usage: python benchmarks/train_memory.py [--rows 4] [--length 512] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

RUNTIME = """
import json, re
import headrace.trainer.run
text = open("/proc/self/status").read()
print(json.dumps({"bytes": int(re.search(r"VmRSS:\\s+(\\d+)", text)[1]) * 1024}))
"""

ACTIVATIONS = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
model_config, rows, length = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config), dtype=torch.float32)
parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
saved = {}
def pack(tensor):
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in parameters:
        saved[storage.data_ptr()] = storage
    return tensor
ids = torch.randint(0, model_config["vocab_size"], (rows, length))
with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    logits = model(ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
print(json.dumps({"bytes": sum(storage.nbytes() for storage in saved.values())}))
"""

TRAIN = """
import json, sys
from rich.console import Console
from headrace.trainer import train
config = json.loads(sys.argv[1])
result = train(config, console=Console(stderr=True))
print(json.dumps({"peak": result.peak_rss_bytes, "state": result.state_bytes,
                  "parameters": result.num_parameters}))
"""


def measure(code: str, *arguments: object) -> dict[str, int]:
    """Run ``code`` in a fresh process; its last line is a JSON object."""
    command = [sys.executable, "-c", code, *(json.dumps(a) for a in arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4, help="rows of the micro-batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--activations", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rng = random.Random(0)  # noqa: S311 - tokens, not secrets
        ids = [[rng.randrange(49152) for _ in range(options.length)] for _ in range(16)]
        data = Path(folder) / "tokens.jsonl"
        data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
        config = {
            "model_config": MODEL,
            "datasets": [{"path": str(data), "type": "tokens"}],
            "data_cache_dir": f"{folder}/cache",
            "output_dir": f"{folder}/run",
            "max_length": options.length,
            "per_device_train_batch_size": options.rows,
            "learning_rate": 1e-4,
            "max_steps": 3,
            "logging_steps": 1,
            "save_strategy": "no",
            "engine": {"activations": options.activations},
            "device": "cpu",
        }
        run = measure(TRAIN, config)
    runtime = measure(RUNTIME)["bytes"]
    activations = measure(ACTIVATIONS, [MODEL, options.rows, options.length])["bytes"]
    expected = run["state"] + activations + runtime
    figures = {
        "num_parameters": run["parameters"],
        "state_bytes": run["state"],
        "state_bytes_per_parameter": run["state"] / run["parameters"],
        "activation_bytes": activations,
        "runtime_bytes": runtime,
        "peak_rss_bytes": run["peak"],
        "ratio": run["peak"] / expected,
        "rows": options.rows,
        "length": options.length,
        "activations": options.activations,
    }
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        shown = f"{value / 2**20:,.0f} MiB" if name.endswith("_bytes") else value
        print(f"{name:28} {shown}")


if __name__ == "__main__":
    main()
