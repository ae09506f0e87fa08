"""Write ``audit_example.json``, the result that the report's tests render.

    python tests/data/make_audit_example.py

Three models on a simulated panel: one that knows the future up to its cutoff, one that knows
nothing, and one whose cutoff lies after the panel. Run again when the schema gains a field.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headrace.audit import EmbeddingSource, run_audit, write_json
from headrace.audit.synthetic import SyntheticConfig, simulate

STACK = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "attention": "sdpa",
    "device": "cpu",
    "dtype": "float32",
}


def source(values):
    return EmbeddingSource(
        values=values, stack=STACK, source="simulated", template="panel/1",
        pooling="last_token", layer=-1,
    )  # fmt: skip


def main() -> None:
    size = {
        "num_entities": 80,
        "num_sessions": 800,
        "rows_per_entity": 60,
        "cutoff_fraction": 0.65,
        "seed": 11,
    }
    base = simulate(SyntheticConfig(leak=0.05, **size))
    trained = simulate(SyntheticConfig(num_twins=0, **size))
    result = run_audit(
        replace(base.panel, name="synthetic 80 x 800", notes=("Targets are simulated.",)),
        {
            "base": source(base.embedding),
            "trained": source(trained.embedding),
            "later": source(base.embedding),
        },
        {"base": base.cutoff, "trained": base.cutoff, "later": "2030-12-31"},
        twins={name: source(values) for name, values in base.twins.items()},
        reductions=[("base", "trained")],
    )
    write_json(result, Path(__file__).with_name("audit_example.json"))


if __name__ == "__main__":
    main()
