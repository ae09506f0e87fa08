"""Write ``docs/models.md``: every decoder family with what its tests measured.

    python docs/generate_models.py

Runs the family tests on this machine and takes their figures; a test fails when a family is
missing from the page.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = Path(__file__).with_name("models.md")

_HEAD = """# Models

Any decoder-only causal LM of transformers trains if its layers can be streamed exactly: a hidden
state in, a hidden state out, once each and in order. Whether they can is found by watching a tiny
twin of the model run (same class, same switches, small sizes), and proven by comparing the
gradient of every parameter with plain autograd of transformers' own, unmodified model:

```bash
headrace doctor --model FOLDER
```

needs no weights, only `config.json`, takes seconds, and says `ok`, or `refused` with the reason.
The same test runs before the first step of `headrace train`, and is remembered by class, switches
and versions. With adapters it compares them with PEFT's, too ([adapters.md](adapters.md)).

The twin is tested in float32 with weight slots that are overwritten with NaN whenever they are
free: kept and recomputed activations, rows of one document and packed rows, the balancing loss of
routers where the class has one. Where layers will be compiled, they are traced as well (for the
CPU, some seconds more), for a compiler may lose a gradient without a word: torch 2.11 does where an
autograd function's forward ends with an operator that returns its own argument, such as a cast to
the type it has. The reference runs every document by itself with eager attention and eager experts.

## Proven families

`python docs/generate_models.py` runs `pytest tests/parity/test_families.py` and writes this table.
Gradient: worst relative error of any parameter's gradient. Leak: relative change of a document's
gradients when its neighbour in a packed row changes. Reload: largest difference of logits after
export and `from_pretrained`.

| family | class | gradient | leak | reload |
|---|---|---|---|---|
"""

_MIDDLE = """
## Refused

What the test says of some models that cannot be trained exactly, or not yet:

| model type | reason |
|---|---|
"""

_TAIL = """
Also refused: dropout and router noise above 0 (forward and recompute would differ), quantized
weights, and integer buffers in a checkpoint.

## Every class of transformers

`python benchmarks/causal_lms.py --no-dropout` tests the default configuration of every causal LM
class with dropout and router noise set to 0. With transformers 5.24, of 196 classes 95 are
proven (gradients within 1e-5, or within four times what the last bit of the weights makes of them):

`afmoe`, `apertus`, `apertus1p5_text`, `arcee`, `aria_text`, `axk1`, `beam`, `bitnet`, `codegen`,
`cohere`, `cohere2`, `cohere2_moe`, `cwm`, `deepseek_v3`, `diffllama`, `ernie4_5`, `ernie4_5_moe`,
`exaone`, `exaone4`, `exaone_moe`, `flex_olmo`, `flint`, `fuyu`, `gemma`, `gemma2`, `gemma3`,
`gemma3_text`, `glm`, `glm4`, `glm4_moe`, `glm4_moe_lite`, `got_ocr2`, `gpt-sw3`, `gpt2`,
`gpt_bigcode`, `gpt_neox`, `gpt_oss`, `gptj`, `granite`, `granite_swa`, `granitemoe`,
`granitemoe_swa`, `granitemoeshared`, `helium`, `hy_v3`, `hyperclovax`, `internlm3`,
`iquestcoder`, `jais2`, `jetmoe`, `kolibri1`, `laguna`, `lara_mini`, `lfm2`, `llama`,
`longcat_flash`, `mellum`, `mimo_v2_flash`, `minicpm3`, `minimax_m2`, `minimax_m3_vl_text`,
`ministral3`, `mistral`, `mixtral`, `moshi`, `moss_transcribe_diarize`, `nanochat`, `olmo`,
`olmo2`, `olmo3`, `olmo_hybrid`, `olmoe`, `opt`, `persimmon`, `phi`, `phi3`, `phimoe`, `qwen2`,
`qwen2_moe`, `qwen3`, `qwen3_5`, `qwen3_5_moe`, `qwen3_5_moe_text`, `qwen3_5_text`, `qwen3_moe`,
`qwen3_next`, `sarvam_mla`, `sarvam_moe`, `seed_oss`, `smollm3`, `solar_open`, `stablelm`,
`starcoder2`, `vaultgemma`, `youtu`.

The others are encoders and encoder-decoders, state-space models, models that build masks of their
own, share state between layers, or leave sizes open by default; the program prints each reason. A
default configuration is not a released one: LFM2's has attention alone.

## Checkpoints

Weights are read and written in the form that transformers writes: experts one by one where it
keeps them fused, the names of the checkpoint that was loaded. What a bfloat16 model keeps in
float32 by its class (routing biases, some routers) keeps all its bits in the state, in checkpoints
and in exports. Tensors that the causal LM has no place for (vision towers, multi-token prediction)
are carried to every checkpoint and export unchanged; the log says how many. Where some belong to
layers that are trained, a warning names one: `config.json` may be another model's.

## Mixtures of experts

The balancing loss is that of the class (`load_balancing_loss_func`), of every micro-batch over all
its layers, weighted by supervised tokens: it does not depend on waves or accumulation. As in
transformers it is part of the gradient when the configuration has `output_router_logits: true`,
with `router_aux_loss_coef`, or by the key of that name in a training file. Routing biases are not
trained. A step whose recompute sends a token to another expert than forward did fails. Every expert
without a token has a zero gradient.

A layer whose experts exceed the windows is sent in slices of experts (`engine.expert_slices: N`),
so that the device holds what is no expert's (attention, norms, router, shared experts) and a
slice or two, of weights as of gradients. Left open, it is chosen on CUDA where nothing fits with
whole layers, as few slices as fit. Each slice is sent once a wave and direction. Such a layer
recomputes, and what is no expert's runs forward four times a step instead of twice: up to the
experts and after them, in forward and in recompute. The result is that of whole layers, but for
rounding: a token's experts are summed in another order (with two a token, Qwen3-MoE, Mixtral and
OLMoE are bitwise the same in float32 on a CPU, gpt-oss is not);
balancing loss, load, idle experts and the check that recompute routes alike hold as they do
there. It takes routed experts that lie stacked in one module and run as grouped products, as in
every family above; the self-test proves a class with slices, too. On several ranks each section is
shared out by itself: every rank sends its part of each slice, and gradients are summed as those of
whole layers are (with two ranks and two experts a token the same bits). Adapters, their dropout and
frozen parts are as with whole layers; frozen experts are sent, and have no gradient. Refused before
anything is trained: models without such experts, more slices than a layer has experts.

## Packed documents

Attention never builds a mask: document boundaries, windows, soft caps and sinks are arguments of
headrace's own attention function. Convolutions and states of gated DeltaNet layers, and LFM2's
convolutions, begin anew with every document. States run on torch operators, or on
flash-linear-attention's kernel where that is installed, has no known fault with this card and
Triton, and agrees with the torch operators on this card, results and gradients; which of them it
is, is logged once. Models whose layers do not hand document boundaries on to their mixers (Mamba)
are refused; attention gets them either way.
"""

_REFUSED = {
    "gemma3n_text": {},
    "gemma4_text": {},
    "t5": {},
    "bart": {"dropout": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "bloom": {},
    "deepseek_v32": {},
    "falcon": {},
    "llama4_text": {},
    "mamba2": {},
    "zaya": {},
}


def measured() -> dict[str, dict[str, object]]:
    """Run the family tests."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "families.json"
        subprocess.run(  # noqa: S603 - this interpreter, arguments of our own
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "tests/parity/test_families.py",
                f"--families-json={target}",
            ],
            cwd=ROOT,
            check=True,
        )
        found: dict[str, dict[str, object]] = json.loads(target.read_text(encoding="utf-8"))
    return found


def refused() -> list[tuple[str, str]]:
    """Model types with the reason of their refusal."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow

    from headrace.selftest import run_selftest  # noqa: PLC0415 - slow

    rows = []
    for model_type, values in _REFUSED.items():
        verdict = run_selftest(AutoConfig.for_model(model_type, **values), use_cache=False)
        if verdict.verdict != "refused":
            raise SystemExit(f"{model_type} is no longer refused")
        rows.append((model_type, str(verdict.reason)))
    return rows


def generate() -> str:
    """The whole page."""
    rows = [
        f"| {family} | `{row['architecture']}` | {row['gradient_error']:.1e} "
        f"| {row['packing_leak']:.1e} | {row['reload_error']:g} |"
        for family, row in measured().items()
    ]
    reasons = [f"| `{model_type}` | {reason} |" for model_type, reason in refused()]
    return _HEAD + "\n".join(rows) + "\n" + _MIDDLE + "\n".join(reasons) + "\n" + _TAIL


if __name__ == "__main__":
    TARGET.write_text(generate(), encoding="utf-8")
    print(f"wrote {TARGET}")
