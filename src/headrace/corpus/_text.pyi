# Types of the compiled module; csrc/text/module.cpp is its source.

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class Encoder:
    def set_classes(
        self, codes: NDArray[np.uint32], classes: NDArray[np.uint8], orders: NDArray[np.uint8]
    ) -> None: ...
    def set_whole(self, words: Sequence[bytes], ids: NDArray[np.int32]) -> None: ...
    def set_around(self, before: Sequence[int], end: int) -> None: ...
    def unknown_blocks(self, data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> list[int]: ...
    def encode(
        self, data: NDArray[np.uint8], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]: ...

def make_encoder(
    rules: NDArray[np.int32],
    digits_alone: bool,
    byte_ids: NDArray[np.int32],
    left: NDArray[np.int32],
    right: NDArray[np.int32],
    merged: NDArray[np.int32],
    normalised: bool,
    added: Sequence[str],
) -> Encoder: ...

class Surveyor:
    def survey(
        self, data: NDArray[np.uint8], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.uint8]]: ...

def make_surveyor(
    cues: Sequence[str],
    names: Sequence[str],
    first_year: int,
    last_year: int,
    num_languages: int,
    words: Sequence[tuple[str, int]],
    lower: Sequence[tuple[int, int]],
    scripts: Sequence[tuple[int, int, int]],
    named: tuple[int, int, int, int],
    ukrainian_letters: Sequence[int],
) -> Surveyor: ...

class Folder:
    def __init__(self) -> None: ...
    def add(self, code: int, folded: str) -> None: ...
    def fold(
        self, data: NDArray[np.uint8], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]: ...

class MinHasher:
    def sign(self, data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.uint32]: ...

def make_min_hasher(
    width: int, a: Sequence[int], b: Sequence[int], values: NDArray[np.uint64]
) -> MinHasher: ...
