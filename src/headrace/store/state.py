"""The training state of a model: master weights and moments, in host memory or on the device.

Invariants: with ``dtype="bfloat16"`` the fp32 master weight is ``(hi << 16) + lo`` exactly, ``hi``
being the bf16 value that compute uses; state is 12 bytes a trainable parameter and 2 a frozen
one. With ``dtype="float32"`` the master is plain fp32: 12 and 4 bytes. One copy, whatever the
number of readers: of several ranks each holds its shard (:mod:`headrace.store.ranges`) alone.
Nothing here knows the engine or files.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from headrace import kernels
from headrace.errors import CapacityError, ConfigError, DataError
from headrace.store.arena import Arena
from headrace.store.finite import all_finite
from headrace.store.ranges import Share, UnitShard, unit_shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.store.layout import ParamSpec, UnitLayout
    from headrace.store.sections import Section
    from headrace.store.snapshot import Snapshot

StateDtype = Literal["bfloat16", "float32"]


# What a stored weight may be; quantised kinds carry scales of their own.
_MASTER_SOURCES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class HasUnits(Protocol):
    """A model's structure, as far as its state is concerned."""

    @property
    def units(self) -> tuple[UnitLayout, ...]:
        """Layouts in order of use."""


class UnitState:
    """Flat views of one unit's planes. Lengths: ``size`` for weights, ``num_trainable`` else.

    Of several ranks' units they are a shard: lengths are ``shard.numel`` and
    ``shard.num_trained``, and what is stored of a parameter are the parts that lie here.

    Attributes:
        shard: which elements of the unit the planes hold.
        weights: bfloat16 (the ``hi`` plane) or float32 ``(size,)``; what is sent to the device.
        remainder: int16 (the ``lo`` plane) ``(num_trainable,)``, None when weights are float32.
        exp_avg: float32 ``(num_trainable,)``.
        exp_avg_sq: float32 ``(num_trainable,)``.
        on_device: the planes live on the compute device and are updated there.
    """

    def __init__(
        self,
        layout: UnitLayout,
        weights: torch.Tensor,
        remainder: torch.Tensor | None,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        *,
        on_device: bool = False,
        shard: UnitShard | None = None,
    ) -> None:
        self.layout = layout
        self.shard = shard or unit_shard(layout, Share())
        self.on_device = on_device
        self._kernels = kernels.load()
        self.weights = weights
        self.remainder = remainder
        self.exp_avg = exp_avg
        self.exp_avg_sq = exp_avg_sq
        # The host kernels take NumPy arrays; the views are made once, they share the memory.
        self.arrays: HostArrays | None = None
        if not on_device:
            self.arrays = HostArrays(weights, remainder, exp_avg, exp_avg_sq)

    @classmethod
    def empty(cls, layout: UnitLayout, dtype: StateDtype, device: str = "cpu") -> UnitState:
        """Zeros in memory of its own; on the meta device types and shapes alone."""
        split = dtype == "bfloat16"
        n = layout.num_trainable
        working = torch.bfloat16 if split else torch.float32
        return cls(
            layout,
            torch.zeros(layout.size, dtype=working, device=device),
            torch.zeros(n, dtype=torch.int16, device=device) if split else None,
            torch.zeros(n, device=device),
            torch.zeros(n, device=device),
            on_device=device != "cpu",
        )

    @property
    def num_bytes(self) -> int:
        """Of all planes, alignment included."""
        planes = (self.weights, self.remainder, self.exp_avg, self.exp_avg_sq)
        return sum(plane.nbytes for plane in planes if plane is not None)

    def copy(self) -> UnitState:
        """The same values in host memory of their own."""

        def taken(plane: torch.Tensor) -> torch.Tensor:
            return plane.to("cpu", copy=True)

        return UnitState(
            self.layout,
            taken(self.weights),
            None if self.remainder is None else taken(self.remainder),
            taken(self.exp_avg),
            taken(self.exp_avg_sq),
            shard=self.shard,
        )

    @property
    def planes(self) -> dict[str, torch.Tensor]:
        """What only updates touch, by name: of trainable elements."""
        planes = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if self.remainder is not None:
            planes["remainder"] = self.remainder
        return planes

    def set_plane(self, param: ParamSpec, name: str, value: torch.Tensor) -> None:
        """Store a trainable parameter's part of one of :attr:`planes`."""
        for own, given in self.shard.own(param.offset, param.numel):
            self.planes[name][own].copy_(value.reshape(-1)[given])

    def master(self, param: ParamSpec) -> torch.Tensor:
        """A float32 copy of a parameter's master weight, in its shape."""
        assert self.shard.is_whole, "a shard has no whole parameters"
        weights = self.weights[param.slice].cpu()
        low = None
        if self.remainder is not None and param.trainable:
            low = self.remainder[param.slice]
        elif self.remainder is not None and param.low_offset is not None:
            low = self.weights[param.low_slice].view(torch.int16)
        if low is None:
            return weights.to(torch.float32, copy=True).view(param.shape)
        out = np.empty(param.numel, np.float32)
        self._kernels.join_float32(weights.view(torch.uint16).numpy(), low.cpu().numpy(), out)
        return torch.from_numpy(out).view(param.shape)

    def stored(self, param: ParamSpec, *, described: bool = False) -> torch.Tensor:
        """What a checkpoint holds of a parameter: a view of the weights it is computed with.

        What a bfloat16 model computes in float32 is a float32 copy.

        Args:
            param: of this unit.
            described: only type and shape, on the meta device.
        """
        full = self.remainder is not None and param.low_offset is not None
        if described:
            dtype = torch.float32 if full else self.weights.dtype
            return torch.empty(param.shape, dtype=dtype, device="meta")
        return self.master(param) if full else self.weights[param.slice].view(param.shape)

    def refresh_low_halves(self) -> None:
        """Make what is sent of float32 parameters that of the last update; call before sending.

        Not of a shard, whose low halves lie with other ranks: they are exchanged.
        """
        if self.remainder is None or not self.shard.is_whole:
            return
        for param in self.layout.float32_params:
            if param.trainable:
                low = self.weights[param.low_slice].view(torch.int16)
                low.copy_(self.remainder[param.slice])

    def set_master(self, param: ParamSpec, value: torch.Tensor) -> None:
        """Store a parameter's master weight; ``value`` has the parameter's shape, any float dtype.

        Raises:
            DataError: the shape differs, it is not a float dtype that can be widened, or a value is
                not finite (or rounds to infinity in bf16).
        """
        if tuple(value.shape) != param.shape:
            raise DataError(
                f"{param.name} has shape {tuple(value.shape)}, the model's is {param.shape}",
                remedy="load weights that belong to the model's config.json",
            )
        if value.dtype not in _MASTER_SOURCES:
            raise DataError(
                f"{param.name} holds {value.dtype}, which is no plain weight",
                remedy="dequantise the model and save it in bfloat16 or float32",
            )
        flat = value.detach().reshape(-1)
        if flat.dtype == torch.float64:  # before the check: what leaves float32 becomes infinite
            flat = flat.to(torch.float32)
        if not all_finite(flat):
            raise DataError(
                f"{param.name} has NaN or infinite values", remedy="copy or download it again"
            )
        if self.remainder is None or flat.dtype == torch.bfloat16:
            self._set_weights(param, flat)
            for low, _ in self._low_halves(param):
                low.zero_()
            return
        source = np.ascontiguousarray(flat.to(torch.float32).numpy())
        low_host = torch.empty(param.numel, dtype=torch.int16)
        high_host = torch.empty(param.numel, dtype=torch.bfloat16)
        bits = high_host.view(torch.uint16).numpy()
        if not self._kernels.split_float32(source, bits, low_host.numpy()):
            raise DataError(
                f"{param.name} has values that round to infinity in bfloat16",
                remedy="dtype: float32",
            )
        self._set_weights(param, high_host)
        for low, part in self._low_halves(param):
            low.copy_(low_host[part])

    def _set_weights(self, param: ParamSpec, flat: torch.Tensor) -> None:
        for own, given in self.shard.own(param.offset, param.numel):
            self.weights[own].copy_(flat[given])

    def _low_halves(self, param: ParamSpec) -> list[tuple[torch.Tensor, slice]]:
        """Everywhere that low halves of a parameter are kept, as int16, and which these are."""
        kept: list[tuple[torch.Tensor, slice]] = []
        if self.remainder is None:
            return kept
        if param.trainable:
            places = self.shard.own(param.offset, param.numel)
            kept += [(self.remainder[own], given) for own, given in places]
        if param.low_offset is not None:
            places = self.shard.own(param.low_offset, param.numel)
            kept += [(self.weights[own].view(torch.int16), given) for own, given in places]
        return kept


class HostArrays:
    """A unit's planes as the host kernels take them.

    Attributes:
        master: uint16 bits and int16 remainders, or float32 weights.
        exp_avg: float32.
        exp_avg_sq: float32.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        remainder: torch.Tensor | None,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> None:
        self.master: tuple[NDArray[Any], ...]
        if remainder is None:
            self.master = (weights.numpy(),)
        else:
            self.master = (weights.view(torch.uint16).numpy(), remainder.numpy())
        self.exp_avg: NDArray[np.float32] = exp_avg.numpy()
        self.exp_avg_sq: NDArray[np.float32] = exp_avg_sq.numpy()


class ModelState:
    """All units of a model.

    Host units lie in two arenas, what is sent and what only updates touch; the first
    ``device_units`` lie on the device. Each of several ranks holds its shard of every unit.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        dtype: StateDtype,
        *,
        device: torch.device | str = "cpu",
        device_units: int = 0,
        share: Share | None = None,
        sections: Sequence[tuple[Section, ...]] = (),
    ) -> None:
        """Allocate zeroed state for ``layouts``.

        Args:
            layouts: one a unit, in order of use.
            dtype: ``"bfloat16"`` for the split master, ``"float32"`` for a plain one.
            device: where compute runs; for CUDA what is sent is registered, so that DMA reads it.
            device_units: how many units, from the embedding on, have all their state on
                ``device``: they are neither sent nor returned, and updated there. The first ones,
                because a step needs them first, while the host still updates the others.
            share: which rank of how many this is; one has everything.
            sections: what each unit is sent in: several ranks share out each section by itself;
                empty for whole units.

        Raises:
            CapacityError: the host or the device does not have the memory.
        """
        self.dtype: StateDtype = dtype
        self.layouts = tuple(layouts)
        self.optimizer_step = 0  # updates applied; the t of the bias correction
        self.snapshot: Snapshot | None = None  # of a save that is being written
        device = torch.device(device)
        if not 0 <= device_units <= len(self.layouts):
            raise ConfigError(
                f"device_units is {device_units}; the model has {len(self.layouts)} units "
                "(embedding, layers, head)",
                remedy=f"engine.device_units: {len(self.layouts)} at most",
            )
        self.device_units = device_units
        self.share = share or Share()
        self.shards = tuple(
            unit_shard(layout, self.share, parts)
            for layout, parts in zip(self.layouts, sections or repeat(()), strict=bool(sections))
        )
        host = self.shards[device_units:]
        split = dtype == "bfloat16"
        sent_bytes = (2 if split else 4) * sum(shard.numel for shard in host)
        kept_bytes = (10 if split else 8) * sum(shard.num_trained for shard in host)
        cuda = device.type == "cuda"
        self._sent = Arena(sent_bytes, name="working weights", register_cuda=cuda)
        self._kept = Arena(kept_bytes, name="optimizer state", register_cuda=False)
        self.units: list[UnitState] = []
        sent = kept = 0
        weight_dtype = torch.bfloat16 if split else torch.float32
        sharded = list(zip(self.layouts, self.shards, strict=True))
        for layout, shard in sharded[:device_units]:
            self.units.append(_unit_on_device(layout, shard, weight_dtype, device))
        for layout, shard in sharded[device_units:]:
            weights = self._sent.tensor(sent, shard.numel, weight_dtype)
            sent += weights.nbytes
            n = shard.num_trained
            exp_avg = self._kept.tensor(kept, n, torch.float32)
            exp_avg_sq = self._kept.tensor(kept + 4 * n, n, torch.float32)
            kept += 8 * n
            remainder = None
            if split:
                remainder = self._kept.tensor(kept, n, torch.int16)
                kept += 2 * n
            self.units.append(
                UnitState(layout, weights, remainder, exp_avg, exp_avg_sq, shard=shard)
            )

    @classmethod
    def allocate(
        cls,
        spec: HasUnits,
        dtype: StateDtype = "bfloat16",
        *,
        device: torch.device | str = "cpu",
        device_units: int = 0,
        share: Share | None = None,
    ) -> ModelState:
        """Zeroed state for a model; see the class for the arguments."""
        return cls(spec.units, dtype, device=device, device_units=device_units, share=share)

    def before_update(self, unit: int) -> None:
        """Called before a unit's planes change; waits for a snapshot that still needs them."""
        if (snapshot := self.snapshot) is not None:
            snapshot.before_update(unit)

    @property
    def state_bytes(self) -> int:
        """Bytes of master weights and moments of all ranks, alignment not counted."""
        frozen = 2 if self.dtype == "bfloat16" else 4
        trainable = sum(layout.num_trainable_parameters for layout in self.layouts)
        total = sum(param.numel for layout in self.layouts for param in layout.params)
        low = 0
        if self.dtype == "bfloat16":
            low = 2 * sum(p.numel for layout in self.layouts for p in layout.float32_params)
        return 12 * trainable + frozen * (total - trainable) + low

    @property
    def allocated_bytes(self) -> int:
        """Bytes that this rank's weights and moments really take, alignment included."""
        on_device = sum(unit.num_bytes for unit in self.units[: self.device_units])
        return self._sent.num_bytes + self._kept.num_bytes + on_device

    def close(self) -> None:
        """Unregister and unmap the arenas; every view becomes invalid."""
        self.units.clear()
        self._sent.close()
        self._kept.close()


def _unit_on_device(
    layout: UnitLayout, shard: UnitShard, weight_dtype: torch.dtype, device: torch.device
) -> UnitState:
    n = shard.num_trained
    try:
        weights = torch.zeros(shard.numel, dtype=weight_dtype, device=device)
        moments = [torch.zeros(n, dtype=torch.float32, device=device) for _ in range(2)]
        remainder = None
        if weight_dtype == torch.bfloat16:
            remainder = torch.zeros(n, dtype=torch.int16, device=device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the device has no room for the state of unit {layout.name} ({12 * n:,} bytes)",
            remedy="lower engine.device_units",
        ) from error
    return UnitState(layout, weights, remainder, *moments, on_device=True, shard=shard)
