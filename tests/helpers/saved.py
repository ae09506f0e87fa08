"""Trained tiny states, and saving them as a trainer does."""

import json

from headrace.models.spec import ModelSpec
from headrace.store.checkpoint import RECORD, save_checkpoint
from headrace.store.state import ModelState
from tiny import make_batches, make_engine, tiny_config, tiny_state

TRAINER_STATE = {"epoch": 1, "sampler": {"seed": 3, "index": 17}, "best": 2.5}


def trained(config=None, dtype="bfloat16", *, steps=2):
    """A spec and a state whose planes all hold something."""
    spec, state = tiny_state(config or tiny_config(tied=True), dtype)
    with make_engine(spec, state) as engine:
        for seed in range(steps):
            engine.step(make_batches(1, seed=seed), learning_rate=1e-2, max_grad_norm=1.0)
        engine.synchronize()
    return spec, state


def fresh(config=None, dtype="bfloat16"):
    spec = ModelSpec(config or tiny_config(tied=True))
    return spec, ModelState(spec.units, dtype)


def save(output_dir, spec, state, step, **kwargs):
    return save_checkpoint(
        output_dir, spec, state, step=step, trainer_state=TRAINER_STATE, **kwargs
    )


def forget_digests(path, **changes):
    """Make a checkpoint one of a version that had no digests, with changes to its record.

    Sizes are those of the files; ``...`` removes a key.
    """
    (path / "digests.json").unlink(missing_ok=True)
    record = json.loads((path / RECORD).read_text()) | {"digest": ..., "digests": ...} | changes
    files = {
        name: (path / name).stat().st_size for name in record["files"] if name != "digests.json"
    }
    record |= {"files": files}
    kept = {key: value for key, value in record.items() if value is not ...}
    (path / RECORD).write_text(json.dumps(kept))
