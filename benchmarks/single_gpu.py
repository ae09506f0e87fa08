"""Training steps on one GPU, beside the ceilings of the same run.

``python -m benchmarks.single_gpu --suite headline`` runs each case in a process of its own and
prints one table; ``--out results.json`` holds every figure. Models are random-initialised from
their shapes, nothing is downloaded. Correct first: the suite begins with loss and gradients of the
streamed step against plain PyTorch, and with the device update against the host kernel, bit for
bit.

Figures: model FLOPs (``headrace.models.flops``, recompute not counted), supervised and unsupervised
tokens of full rows, clipping and the update included. A step returns while its deferred updates
run, so the last step's tail is added to the mean.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
             "vocab_size": 8192, "tie_word_embeddings": False},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
           "vocab_size": 151936, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
           "vocab_size": 151936, "tie_word_embeddings": False},
}  # fmt: skip
SEQUENCE = 4096
WARM_UP = 2

SUITES: dict[str, list[dict[str, Any]]] = {
    "headline": [
        {"kind": "parity"},
        {"kind": "ceilings"},
        {"kind": "train", "model": "8b", "tokens": 32768, "options": {}},
        {"kind": "train", "model": "8b", "tokens": 32768,
         "options": {"device_units": 21, "recompute_layers": 16}},
        {"kind": "train", "model": "4b", "tokens": 32768,
         "options": {"device_units": 38, "recompute_layers": 12}},
    ],
    "parity": [{"kind": "parity"}],
}  # fmt: skip


def qwen3_config(name: str) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(max_position_embeddings=32768, **SHAPES[name])


def ceilings() -> dict[str, float]:
    """Rates of this run: bf16 matmul, PCIe each way alone and both ways at once."""
    import torch

    device = torch.device("cuda")

    def seconds(work: Any, repeats: int) -> float:
        work()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    matmul = 2 * 8192**3 / seconds(lambda: torch.mm(a, b, out=out), 20)
    hosts = [torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(2)]
    h2d = (1 << 30) / seconds(lambda: devices[0].copy_(hosts[0], non_blocking=True), 4)
    d2h = (1 << 30) / seconds(lambda: hosts[1].copy_(devices[1], non_blocking=True), 4)
    side = torch.cuda.Stream()

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            hosts[1].copy_(devices[1], non_blocking=True)
        devices[0].copy_(hosts[0], non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    duplex = (1 << 30) / seconds(both, 4)
    return {
        "matmul_tflops": matmul / 1e12,
        "h2d_gbps": h2d / 1e9,
        "d2h_gbps": d2h / 1e9,
        "duplex_each_way_gbps": duplex / 1e9,
    }


def fill_randomly(spec: Any, state: Any) -> None:
    """Normal weights of std 0.02, norms one: the first layer is drawn, the others copy it."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for index, unit in enumerate(state.units):
        if 1 < index <= spec.num_layers:
            unit.weights.copy_(state.units[1].weights)
            continue
        for param in unit.layout.params:
            target = unit.weights[param.slice]
            if len(param.shape) < 2:
                target.fill_(1.0)
                continue
            piece = torch.randn(min(param.numel, 1 << 24), generator=generator) * 0.02
            for start in range(0, param.numel, piece.numel()):
                stop = min(start + piece.numel(), param.numel)
                target[start:stop].copy_(piece[: stop - start])


def random_batches(vocab_size: int, tokens: int, rows: int, seed: int) -> list[Any]:
    """Micro-batches of ``rows`` full sequences of random tokens."""
    import torch

    from headrace.batch import MicroBatch

    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(tokens // (rows * SEQUENCE)):
        ids = torch.randint(0, vocab_size, (rows, SEQUENCE), generator=generator)
        targets = torch.roll(ids, -1, 1)
        targets[:, -1] = -100
        positions = torch.arange(SEQUENCE).expand(rows, SEQUENCE).contiguous()
        result.append(MicroBatch(input_ids_BT=ids, targets_BT=targets, position_ids_BT=positions))
    return result


def train_case(
    *, model: str, tokens: int, options: dict[str, Any], rows: int = 8, steps: int = 3
) -> dict[str, Any]:
    """Time ``steps`` steps after the warm-up, clipping at 1.0."""
    import torch

    from headrace.engine import Engine, EngineConfig
    from headrace.models.flops import flops_per_token
    from headrace.models.spec import ModelSpec
    from headrace.store.state import ModelState

    options = {"loss_chunk_tokens": 4096, **options}
    spec = ModelSpec(qwen3_config(model))
    state = ModelState.allocate(
        spec, "bfloat16", device="cuda", device_units=options.get("device_units", 0)
    )
    fill_randomly(spec, state)
    results, times = [], []
    with Engine(spec, state, "cuda", EngineConfig(**options)) as engine:
        for step in range(WARM_UP + steps):
            micro_batches = random_batches(spec.vocab_size, tokens, rows, step)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            results.append(engine.step(micro_batches, learning_rate=1e-5, max_grad_norm=1.0))
            times.append(time.perf_counter() - begun)
            print(step, results[-1], f"{times[-1]:.3f} s", file=sys.stderr, flush=True)
        engine.synchronize()
        tail = time.perf_counter() - begun - times[-1]
    seconds = (sum(times[WARM_UP:]) + tail) / steps
    return {
        "seconds": seconds,
        "step_seconds": times,
        "tail_seconds": tail,
        "tokens_per_second": tokens / seconds,
        "tflops": tokens / seconds * flops_per_token(spec, SEQUENCE) / 1e12,
        "device_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "losses": [result.loss for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "exposed_seconds": results[-1].exposed_seconds,
    }


def device_update_is_bitwise() -> bool:
    """The device's update against the host kernel over three steps."""
    import numpy as np
    import torch

    from headrace import kernels
    from headrace.kernels import device
    from headrace.kernels.coefficients import coefficients

    host, rng, n = kernels.load(), np.random.default_rng(0), 1 << 22
    weight = (rng.standard_normal(n) * 0.02).astype(np.float32)
    hi, lo = np.empty(n, np.uint16), np.empty(n, np.int16)
    host.split_float32(weight, hi, lo)
    exp_avg = (rng.standard_normal(n) * 1e-3).astype(np.float32)
    exp_avg_sq = (rng.standard_normal(n) ** 2 * 1e-6).astype(np.float32)
    exp_avg[:1000] *= 1e-36
    exp_avg_sq[:2000] *= 1e-33
    tensors = [torch.from_numpy(hi.copy()).view(torch.bfloat16).cuda()]
    tensors += [torch.from_numpy(a.copy()).cuda() for a in (lo, exp_avg, exp_avg_sq)]
    same = True
    for step in range(1, 4):
        grad = (torch.randn(n) * 1e-3).to(torch.bfloat16)
        settings = {"step": step, "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95,
                    "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.37}  # fmt: skip
        host.adamw_split(hi, lo, exp_avg, exp_avg_sq, grad.view(torch.uint16).numpy(), **settings)
        device.adamw_split(*tensors, grad.cuda(), c=coefficients(**settings))
        for mine, theirs in zip(tensors, (hi, lo, exp_avg, exp_avg_sq), strict=True):
            same &= mine.cpu().view(torch.uint8).numpy().tobytes() == theirs.tobytes()
    return same


def parity() -> dict[str, Any]:
    """Loss and worst relative gradient error of the streamed step against fp32 autograd."""
    return {
        "device_update_is_bitwise": device_update_is_bitwise(),
        "float32 eager": gradient_errors("float32", compiled=False),
        "bfloat16 compiled": gradient_errors("bfloat16", compiled=True),
    }


def gradient_errors(dtype: str, *, compiled: bool) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    from headrace.engine import Engine, EngineConfig
    from headrace.models.spec import ModelSpec
    from headrace.store.loading import initialise
    from headrace.store.state import ModelState

    config = qwen3_config("tiny")
    spec = ModelSpec(config)
    state = ModelState.allocate(spec, dtype, device="cuda", device_units=2)
    initialise(spec, state, seed=1)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {p.name: unit.master(p) for unit in state.units for p in unit.layout.params}
    reference.load_state_dict(weights, strict=False)
    reference.to("cuda")
    batches = random_batches(spec.vocab_size, 2 * SEQUENCE, 1, 0)
    count = sum(batch.num_supervised_tokens for batch in batches)
    expected = 0.0
    for batch in batches:
        logits = reference(batch.input_ids_BT.cuda()).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets_BT.flatten().cuda(), reduction="sum"
        )
        (loss / count).backward()
        expected += loss.item() / count
    settings = EngineConfig(
        compile=compiled, device_units=2, weight_slots=2, poison_slots=True,
        lane_jitter_seconds=0.002,
    )  # fmt: skip
    named = dict(reference.named_parameters())
    worst = 0.0
    with Engine(spec, state, "cuda", settings) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1e9)
        engine.synchronize()
        for index, unit in enumerate(state.units):
            gradient = engine.updater.returned_gradient(index).float().cpu()
            for param in unit.layout.params:
                theirs = named[param.name].grad.cpu()
                mine = gradient[param.slice].view(param.shape)
                worst = max(worst, ((mine - theirs).norm() / theirs.norm()).item())
    return {"loss": abs(expected - result.loss), "gradient": worst}


KINDS = {"parity": parity, "ceilings": ceilings, "train": train_case}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case in a process of its own: device and host memory start empty."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.single_gpu", "--case", json.dumps(case)],
        stdout=subprocess.PIPE, text=True, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"error": f"exit code {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def print_table(records: list[dict[str, Any]]) -> None:
    """One row a training case, with the ratio to the run's matmul rate."""
    rate = next(
        (r["result"].get("matmul_tflops") for r in records if r["case"]["kind"] == "ceilings"), None
    )
    head = ("case", "tok/s", "TFLOP/s", "of matmul", "device GiB", "host GiB")
    print(f"{head[0]:<52}" + "".join(f"{name:>12}" for name in head[1:]))
    for record in records:
        case, result = dict(record["case"]), record["result"]
        if case.pop("kind") != "train" or "error" in result:
            continue
        share = f"{result['tflops'] / rate:.2f}" if rate else "-"
        options = " ".join(f"{k}={v}" for k, v in case["options"].items())
        print(
            f"{case['model'] + ' ' + str(case['tokens']) + ' ' + options:<52}"
            f"{result['tokens_per_second']:>12.0f}{result['tflops']:>12.0f}{share:>12}"
            f"{result['device_peak_gib']:>12.1f}{result['host_peak_gib']:>12.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=sorted(SUITES), default="headline")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        case = json.loads(arguments.case)
        print(json.dumps(KINDS[case.pop("kind")](**case)))
        return
    records = []
    for case in SUITES[arguments.suite]:
        records.append({"case": case, "result": run_case(case)})
        arguments.out.write_text(json.dumps(records, indent=1))
        if case["kind"] != "train":
            print(json.dumps(records[-1]), flush=True)
    print_table(records)


if __name__ == "__main__":
    main()
