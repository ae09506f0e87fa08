"""The processes of one run: who they are, how they agree, how they exchange tensors.

A launcher (torchrun, Slurm's srun) starts one process a device and says by environment variables
which one each is; nothing here starts a process.

Invariants: every rank makes the calls of each group in the same order, and each group belongs to
one thread: agreements to the main thread, tensors of units to the exchange lane, checkpoints to the
thread that saves. So calls of different groups need no order. What all ranks must decide alike is
decided from numbers that all of them have. Nothing waits without a bound, and a rank that fails
ends the others with its reason (:mod:`headrace.parallel.watch`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from headrace.errors import ConfigError, RankError
from headrace.parallel.launch import Place, place_of
from headrace.parallel.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

TIMEOUT_SECONDS = 600.0
AGREE_TIMEOUT = timedelta(minutes=30)  # the main rank may be in a callback
SAVE_TIMEOUT = timedelta(days=2)  # of a checkpoint's next unit: disks may be slow, the watch is not
MEETING = "headrace-meeting"  # the thread that waits for ranks to come
_POLL_SECONDS = 0.05


_meetings = itertools.count()  # a process may train several times


class Ranks:
    """One process among those of a run.

    Attributes:
        rank: of this process.
        size: how many there are.
        local_rank: among the processes of this machine.
        local_size: processes of this machine.
    """

    def __init__(self, place: Place | None = None) -> None:
        """Meet the other processes, if there are any.

        Args:
            place: of this process; None for a run of one.

        Raises:
            RankError: they do not come.
        """
        place = place or Place()
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self._data: Any = None
        self._save: Any = None
        self._watch: Watch | None = None
        self._store: Any = None
        self._num_told = 0
        self._owns_groups = False
        if place.size > 1:
            self._meet(place)

    @classmethod
    def started(cls, environ: Mapping[str, str] = os.environ) -> Ranks:
        """The ranks that a launcher started, by its environment variables; one without any.

        Raises:
            ConfigError: the variables contradict each other.
            RankError: the others do not come.
        """
        return cls(place_of(environ))

    def _meet(self, place: Place) -> None:
        os.environ.setdefault("MASTER_ADDR", place.address)
        os.environ.setdefault("MASTER_PORT", str(place.port))
        if place.local_size == place.size:
            # gloo would look for the machine's name, which containers often cannot resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        name = f"headrace/{next(_meetings)}"
        try:
            store = _heedful(lambda: self._join_groups(name))
        except (RuntimeError, ValueError, OSError) as error:
            raise RankError(
                f"rank {self.rank} of {self.size} did not meet the others, which it waits "
                f"{TIMEOUT_SECONDS:.0f} s for at most: {_first_line(error)}",
                remedy="look at MASTER_ADDR and MASTER_PORT, and whether all processes started",
            ) from error
        self._store = PrefixStore(name, store)
        self._watch = Watch(PrefixStore(f"{name}/watch", store.clone()), self.rank, self.size)

    def _join_groups(self, name: str) -> Any:
        """Make the groups that need no device; the store that all ranks meet at."""
        meeting = timedelta(seconds=TIMEOUT_SECONDS)
        if not dist.is_initialized():
            store, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=meeting))
            _check_sizes(PrefixStore(f"{name}/sizes", store), self.rank, self.size)
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"{name}/groups", store),
                rank=self.rank,
                world_size=self.size,
                timeout=meeting,
            )
            self._owns_groups = True
        else:
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only way to the store of a group that others made
        self._agree = dist.new_group(backend="gloo", timeout=AGREE_TIMEOUT)
        self._save = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
        return store

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to people."""
        return self.rank == 0

    def connect(self, device: torch.device, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Make the group of the exchange lane: NCCL between GPUs, gloo between CPUs.

        Args:
            device: of this rank.
            timeout_seconds: the longest wait for another rank in a step.
        """
        if self.size == 1 or self._data is not None:
            return
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.meet()  # making a group waits, deaf to the watch, for a rank that failed before it
        with self._connected():
            self._data = dist.new_group(
                backend=backend,
                timeout=timedelta(seconds=timeout_seconds),
                device_id=device if device.type == "cuda" else None,
            )

    def stands(self, where: str, how_to_go_on: str) -> None:
        """Keep what is said if a rank is lost from now on.

        Args:
            where: the run stands, as in ``"in step 7"``.
            how_to_go_on: a command or key that does.
        """
        if self._watch is not None:
            self._watch.where, self._watch.how_to_go_on = where, how_to_go_on

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """A call to other ranks: what breaks it is one of them, and is said.

        Raises:
            RankError: gloo, NCCL or the store cannot reach another rank.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self._watch is None:
                raise
            raise self._watch.lost(error) from error

    # -- agreements, by the main thread ------------------------------------------------------

    def table(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, by rank; as many on each. Integers stay exact below 2**53."""
        row = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return [row.tolist()]
        rows = [torch.empty_like(row) for _ in range(self.size)]
        with self._connected():
            dist.all_gather(rows, row, group=self._agree)
        return [found.tolist() for found in rows]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks, the same bits on every rank."""
        if self.size == 1:
            return list(values)
        return [sum(column) for column in zip(*self.table(values), strict=True)]

    def tell(self, value: Any) -> Any:
        """What the main rank gives, a value of JSON types; others' arguments are not looked at."""
        if self.size == 1:
            return value
        self._num_told += 1
        key = f"told/{self._num_told}"
        with self._connected():
            if self.is_main:
                self._store.set(key, json.dumps(value))
                return value
            self._wait_for(key)
            return json.loads(self._store.get(key))

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """The main rank runs what is inside before the others do, however long it takes."""
        if not self.is_main:
            self.tell(None)
        yield
        if self.is_main:
            self.tell(None)

    def meet(self) -> None:
        """Wait until every rank has come here, however long it takes."""
        if self.size == 1:
            return
        self._num_told += 1
        key = f"came/{self._num_told}"
        with self._connected():
            if self._store.add(key, 1) == self.size:
                self._store.set(f"{key}/all", "")
            self._wait_for(f"{key}/all")

    def _wait_for(self, key: str) -> None:
        """Until a key is set; the watch ends the wait when a rank fails."""
        pause = _POLL_SECONDS / 50
        while not self._store.check([key]):
            if self._watch is not None and (reason := self._watch.reason) is not None:
                raise reason
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)

    # -- tensors of units, by the exchange lane ----------------------------------------------

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Complete ``whole``, of which ``own`` is this rank's part, in place."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._connected():
            gather(whole, own, group=self._data)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> None:
        """Sum this rank's part of ``whole`` over ranks, into its place ``own``."""
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with self._connected():
            scatter(own, whole, group=self._data)

    def all_reduce(self, values: torch.Tensor) -> None:
        """Sum over ranks, in place."""
        with self._connected():
            dist.all_reduce(values, group=self._data)

    # -- checkpoints, by the thread that saves -----------------------------------------------

    def send_to_main(self, values: torch.Tensor) -> None:
        """Give a flat tensor of the host to the main rank."""
        with self._connected():
            dist.send(values, 0, group=self._save)

    def receive(self, values: torch.Tensor, rank: int) -> None:
        """Take one from another rank."""
        with self._connected():
            dist.recv(values, rank, group=self._save)

    # -- the end -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """What all ranks do together: a failure inside ends the others, too.

        Raises:
            RankError: another rank's failure came first and is the reason for this one's.
        """
        try:
            yield
        except BaseException as error:
            if self._watch is not None:
                reason = self._watch.failed(error)
                self.close(failed=True)
                if reason is not error:
                    raise reason from error
            raise

    def thread_failed(self, error: BaseException) -> None:
        """End all ranks with the error of a thread that others wait for, or that waits for them."""
        if self._watch is not None:
            self._watch.thread_failed(error)

    def raises(self) -> None:
        """The main thread is about to raise an error that a thread of it may have told."""
        if self._watch is not None:
            self._watch.raises()

    def close(self, *, failed: bool) -> None:
        """Leave the groups; a run that did not fail waits for the slowest rank."""
        if self.size == 1:
            return
        if not failed:
            self.meet()
        if self._watch is not None:
            self._watch.close(failed=failed)
            self._watch = None
        # A failed run's groups may have calls that never end.
        if not failed and self._owns_groups:
            dist.destroy_process_group()


def bind_device(ranks: Ranks, name: str) -> str:
    """What ``device`` means on this rank: the GPU of its number on the machine.

    Raises:
        ConfigError: there are fewer GPUs than processes, or one GPU is named for all.
    """
    if ranks.size == 1 or name == "cpu" or not torch.cuda.is_available():
        return name
    count = torch.cuda.device_count()
    if name not in {"auto", "cuda"}:
        raise ConfigError(
            f"device: {name} names one device for {ranks.size} processes",
            remedy="device: cuda, and each takes the one of its LOCAL_RANK",
        )
    if count == 1 and ranks.local_size > 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return "cuda:0"  # the launcher shows each process its own
    if ranks.local_rank >= count:
        raise ConfigError(
            f"{ranks.local_size} processes on a machine with {count} GPUs",
            remedy=f"torchrun --nproc-per-node {count}",
        )
    return f"cuda:{ranks.local_rank}"


def _check_sizes(store: Any, rank: int, size: int) -> None:
    """Refuse to wait for ranks that others do not know of.

    Raises:
        ConfigError: another process was started as one of more, or of fewer.
        TimeoutError: not all of them came.
    """
    store.set(str(rank), str(size))
    missing, deadline = set(range(size)), time.monotonic() + TIMEOUT_SECONDS
    while missing:
        for other in [other for other in missing if store.check([str(other)])]:
            missing.remove(other)
            if (found := int(store.get(str(other)))) != size:
                raise ConfigError(
                    f"rank {rank} was started as one of {size} processes, rank {other} as one of "
                    f"{found} (WORLD_SIZE)",
                    remedy="start all of them with the same torchrun --nproc-per-node N, or srun",
                )
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"rank {min(missing)} did not come")
        time.sleep(_POLL_SECONDS if missing else 0.0)


def _heedful(meet: Callable[[], Any]) -> Any:
    """Run what waits for other ranks deaf to signals; the main thread answers them meanwhile."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(meet())
        except BaseException as error:  # noqa: BLE001 - handed to who waits
            result.set_exception(error)

    threading.Thread(target=run, name=MEETING, daemon=True).start()
    return result.result()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
