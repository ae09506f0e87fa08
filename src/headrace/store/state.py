"""The training state of a model: master weights and moments in host memory.

Invariants: with ``dtype="bfloat16"`` the fp32 master weight is ``(hi << 16) + lo`` exactly, ``hi``
being the bf16 value that compute uses; state is 12 bytes a trainable parameter and 2 a frozen
one. With ``dtype="float32"`` the master is plain fp32: 12 and 4 bytes. One copy, whatever the
number of readers. Nothing here knows the engine or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from headrace import kernels
from headrace.errors import DataError
from headrace.store.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.store.layout import ParamSpec, UnitLayout

StateDtype = Literal["bfloat16", "float32"]


class HasUnits(Protocol):
    """A model's structure, as far as its state is concerned."""

    @property
    def units(self) -> tuple[UnitLayout, ...]:
        """Layouts in order of use."""


class UnitState:
    """Flat views of one unit's planes. Lengths: ``size`` for weights, ``num_trainable`` else.

    Attributes:
        weights: bfloat16 (the ``hi`` plane) or float32 ``(size,)``; what is sent to the device.
        remainder: int16 (the ``lo`` plane) ``(num_trainable,)``, None when weights are float32.
        exp_avg: float32 ``(num_trainable,)``.
        exp_avg_sq: float32 ``(num_trainable,)``.
    """

    def __init__(
        self,
        layout: UnitLayout,
        weights: torch.Tensor,
        remainder: torch.Tensor | None,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> None:
        self.layout = layout
        self._kernels = kernels.load()
        self.weights = weights
        self.remainder = remainder
        self.exp_avg = exp_avg
        self.exp_avg_sq = exp_avg_sq
        # The kernels take NumPy arrays; the views are made once, they share the memory.
        self.weight_bits: NDArray[np.uint16] | None = None
        self.remainder_array: NDArray[np.int16] | None = None
        self.weight_array: NDArray[np.float32] | None = None
        if remainder is None:
            self.weight_array = weights.numpy()
        else:
            self.weight_bits = weights.view(torch.uint16).numpy()
            self.remainder_array = remainder.numpy()
        self.exp_avg_array: NDArray[np.float32] = exp_avg.numpy()
        self.exp_avg_sq_array: NDArray[np.float32] = exp_avg_sq.numpy()

    def master(self, param: ParamSpec) -> torch.Tensor:
        """A float32 copy of a parameter's master weight, in its shape."""
        if self.remainder is None or not param.trainable:
            return self.weights[param.slice].to(torch.float32, copy=True).view(param.shape)
        assert self.weight_bits is not None
        assert self.remainder_array is not None
        out = np.empty(param.numel, np.float32)
        self._kernels.join_float32(
            self.weight_bits[param.slice], self.remainder_array[param.slice], out
        )
        return torch.from_numpy(out).view(param.shape)

    def set_master(self, param: ParamSpec, value: torch.Tensor) -> None:
        """Store a parameter's master weight; ``value`` has the parameter's shape, any float dtype.

        Raises:
            DataError: the shape differs, or a value is not finite (or rounds to infinity in bf16).
        """
        if tuple(value.shape) != param.shape:
            raise DataError(
                f"{param.name} has shape {tuple(value.shape)}, the model's is {param.shape}"
            )
        flat = value.detach().reshape(-1)
        if flat.dtype == torch.float64:  # before the check: what leaves float32 becomes infinite
            flat = flat.to(torch.float32)
        if not bool(torch.isfinite(flat).all()):
            raise DataError(f"{param.name} has NaN or infinite values; refusing to load it")
        if self.remainder is None:
            self.weights[param.slice].copy_(flat)
            return
        if flat.dtype == torch.bfloat16:
            self.weights[param.slice].copy_(flat)
            if param.trainable:
                self.remainder[param.slice].zero_()
            return
        source = np.ascontiguousarray(flat.to(torch.float32).numpy())
        assert self.weight_bits is not None
        assert self.remainder_array is not None
        low = (
            self.remainder_array[param.slice]
            if param.trainable
            else np.empty(param.numel, np.int16)
        )
        if not self._kernels.split_float32(source, self.weight_bits[param.slice], low):
            raise DataError(f"{param.name} has values that round to infinity in bfloat16")


class ModelState:
    """All units of a model, in two arenas: what is sent, and what only updates touch."""

    def __init__(
        self, layouts: Sequence[UnitLayout], dtype: StateDtype, *, register_cuda: bool = False
    ) -> None:
        """Allocate zeroed state for ``layouts``.

        Args:
            layouts: one a unit, in order of use.
            dtype: ``"bfloat16"`` for the split master, ``"float32"`` for a plain one.
            register_cuda: register the sent plane with CUDA, so that DMA reads it directly.

        Raises:
            CapacityError: the host does not have the memory; nothing was allocated.
        """
        self.dtype: StateDtype = dtype
        self.layouts = tuple(layouts)
        self.optimizer_step = 0  # updates applied; the t of the bias correction
        split = dtype == "bfloat16"
        sent_bytes = (2 if split else 4) * sum(layout.size for layout in layouts)
        kept_bytes = (10 if split else 8) * sum(layout.num_trainable for layout in layouts)
        self._sent = Arena(sent_bytes, name="working weights", register_cuda=register_cuda)
        self._kept = Arena(kept_bytes, name="optimizer state", register_cuda=False)
        self.units: list[UnitState] = []
        sent = kept = 0
        for layout in self.layouts:
            weight_dtype = torch.bfloat16 if split else torch.float32
            weights = self._sent.tensor(sent, layout.size, weight_dtype)
            sent += weights.nbytes
            n = layout.num_trainable
            exp_avg = self._kept.tensor(kept, n, torch.float32)
            exp_avg_sq = self._kept.tensor(kept + 4 * n, n, torch.float32)
            kept += 8 * n
            remainder = None
            if split:
                remainder = self._kept.tensor(kept, n, torch.int16)
                kept += 2 * n
            self.units.append(UnitState(layout, weights, remainder, exp_avg, exp_avg_sq))

    @classmethod
    def allocate(
        cls, spec: HasUnits, dtype: StateDtype = "bfloat16", *, device: torch.device | str = "cpu"
    ) -> ModelState:
        """Zeroed state for a model, sent from registered memory when ``device`` is CUDA."""
        return cls(spec.units, dtype, register_cuda=torch.device(device).type == "cuda")

    @property
    def state_bytes(self) -> int:
        """Bytes of master weights and moments, alignment not counted."""
        frozen = 2 if self.dtype == "bfloat16" else 4
        trainable = sum(layout.num_trainable_parameters for layout in self.layouts)
        total = sum(layout.num_parameters for layout in self.layouts)
        return 12 * trainable + frozen * (total - trainable)

    @property
    def allocated_bytes(self) -> int:
        """Bytes the arenas really hold, alignment included."""
        return self._sent.num_bytes + self._kept.num_bytes

    def close(self) -> None:
        """Unregister and unmap the arenas; every view becomes invalid."""
        self.units.clear()
        self._sent.close()
        self._kept.close()
