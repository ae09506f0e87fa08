"""The verdict of the self-test on every causal LM class of transformers, as it is by default.

A default configuration is not a released model: some cannot be built (sizes left open), some have
dropout, which a run refuses until it is set to 0. With ``--no-dropout`` it is. Each class is tested
in this process, a minute at most.

Usage: python benchmarks/causal_lms.py [--no-dropout] [--only llama qwen3] [--json]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import warnings
from typing import Any

SECONDS = 120
_DROPOUT = ("dropout", "_pdrop", "dropout_prob", "jitter_noise", "layerdrop")


def config_of(model_type: str, *, no_dropout: bool) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    if not no_dropout:
        return config
    noisy = {
        name: 0.0
        for name, value in config.to_dict().items()
        if name.endswith(_DROPOUT) and isinstance(value, float)
    }
    return AutoConfig.for_model(model_type, **noisy)


def verdict_of(model_type: str, *, no_dropout: bool) -> dict[str, Any]:
    from headrace.selftest import run_selftest

    def expired(*_: object) -> None:
        raise TimeoutError(f"no verdict within {SECONDS} s")

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(SECONDS)
    try:
        config = config_of(model_type, no_dropout=no_dropout)
    except Exception as error:  # noqa: BLE001 - whatever a configuration class raises
        reason = f"transformers has no default: {' '.join(str(error).split())}"
        return {"model_type": model_type, "verdict": "no default", "reason": reason}
    else:
        found = run_selftest(config, use_cache=False).to_dict()
        return found | {"model_type": model_type}
    finally:
        signal.alarm(0)


def main() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for model_type in options.only or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        rows.append(verdict_of(model_type, no_dropout=options.no_dropout))
        print(f"{model_type}: {rows[-1]['verdict']}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    good = [row for row in rows if row["verdict"] == "ok"]
    worst = max((row["gradient_error"] for row in good), default=0.0)
    print(f"{len(rows)} classes, {len(good)} ok (worst gradient {worst:.1e}):")
    print(", ".join(f"`{row['model_type']}`" for row in good))
    print("\n| model type | verdict | reason |\n|---|---|---|")
    for row in rows:
        if row["verdict"] != "ok":
            print(f"| `{row['model_type']}` | {row['verdict']} | {row['reason']} |")


if __name__ == "__main__":
    main()
