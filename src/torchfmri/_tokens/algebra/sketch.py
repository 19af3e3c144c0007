"""A fixed random linear map of a parameter's gradient to k numbers, cheap for outer products.

Inner products of sketches are unbiased estimates of inner products of gradients. The map depends
on the seed and on the name and shape of the parameter alone, so that sketches of different
batches, devices and kinds of token gradient can be compared. No random generator is used: the
signs are hashes of their place.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import torch
from torch import Tensor

from torchfmri._arguments import check_number

_BITS = 32  # signs taken from one hash
_KEPT = 1 << 17  # a map of so many signs is kept for the next step
_BLOCK = 1 << 22  # signs made at a time where a whole map would be large


class Sketch:
    """The map of one parameter's gradient to `k` numbers.

    A gradient with two or more dimensions is read as a matrix (o, i), o = shape[0], and becomes
    P_o G P_i^T with k = k_o * k_i as nearly square as k allows (choose k = 64, 256, 1024). A vector
    is multiplied by one (k, n) map. The entries are signs over the root of the number of rows.

    Args:
        name: Of the parameter.
        shape: Of the parameter.
        k: How many numbers come out.
        seed: Another seed is another, independent map.
    """

    def __init__(self, name: str, shape: tuple[int, ...], k: int, seed: int) -> None:
        check_number("k", k, 1, "how many numbers come out, at least 1")
        check_number("seed", seed, None, "a whole number, such as 0")
        self.k = k
        self.count = math.prod(shape)
        self._o = shape[0] if shape else 1
        self._i = self.count // self._o if self._o else 0
        self._key = f"{seed}:{name}:{tuple(shape)}:{k}"
        # A matrix of one row or column is a vector: the two-sided map would waste half of k.
        self._is_vector = min(self._o, self._i) <= 1
        self._k_o = max(each for each in range(1, math.isqrt(k) + 1) if k % each == 0)
        self._k_i = k // self._k_o

    def outer(self, g: Tensor, x: Tensor) -> Tensor:
        """The sketches (t, k) of sum_r g_r x_r^T, from (t, r, o) and (t, r, i).

        Either factor may have one entry for all t. For a weight that is stored (in, out), as in
        Transformers' Conv1D, the input comes first.
        """
        g, x = _widened(g), _widened(x)
        if self._is_vector:
            return self.dense((g.mT @ x).flatten(1))
        left = g @ self._columns("o", self._k_o, 0, self._o, g).mT
        right = x @ self._columns("i", self._k_i, 0, self._i, x).mT
        return _outer(left, right).flatten(1)

    def rows(self, index: Tensor, g: Tensor) -> Tensor:
        """The sketches (t, k) of gradients whose row index[t, r] is the sum of these g (t, r, i).

        `index` may have one entry for all t.
        """
        g = _widened(g)
        if self._is_vector:
            values = g.new_zeros(len(g), self._o, self._i)
            place = index.expand(g.shape[:2]).unsqueeze(-1).expand_as(g)
            return self.dense(values.scatter_add_(1, place, g).flatten(1))
        left = self._columns("o", self._k_o, 0, self._o, g).mT[index]
        right = g @ self._columns("i", self._k_i, 0, self._i, g).mT
        return _outer(left, right).flatten(1)

    def dense(self, values: Tensor) -> Tensor:
        """The sketches (t, k) of flattened gradients (t, n)."""
        values = _widened(values)
        if not self._is_vector:
            matrix = values.reshape(len(values), self._o, self._i)
            right = matrix @ self._columns("i", self._k_i, 0, self._i, values).mT
            left = self._columns("o", self._k_o, 0, self._o, values)
            return (left @ right).flatten(1)
        result = values.new_zeros(len(values), self.k)
        step = max(1, _BLOCK // self.k)
        for start in range(0, self.count, step):
            stop = min(start + step, self.count)
            signs = self._columns("n", self.k, start, stop, values)
            result += values[:, start:stop] @ signs.mT
        return result

    def direction(self, number: int, like: Tensor) -> Tensor:
        """The gradient's coefficients (n,) in number `number` of the sketch, as a tensor like."""
        if self._is_vector:
            return self._columns("n", self.k, 0, self.count, like)[number]
        left = self._columns("o", self._k_o, 0, self._o, like)[number // self._k_i]
        right = self._columns("i", self._k_i, 0, self._i, like)[number % self._k_i]
        return torch.outer(left, right).flatten()

    def _columns(self, side: str, k: int, start: int, stop: int, like: Tensor) -> Tensor:
        """Columns start to stop of a (k, n) map, in the dtype and on the device of `like`."""
        made = _signs if k * (stop - start) <= _KEPT else _signs.__wrapped__
        return made(f"{self._key}:{side}", k, start, stop, like.device, like.dtype)


@lru_cache(maxsize=1024)
def _signs(
    key: str, k: int, start: int, stop: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Signs over the root of k, (k, stop - start), which depend on the key and the place alone."""
    words = -(-k // _BITS)
    place = torch.arange(start * words, stop * words, device=device)
    shifts = torch.arange(_BITS, device=device)
    bits = (_hashed(place, key).unsqueeze(-1) >> shifts) & 1
    signs = bits.reshape(stop - start, words * _BITS)[:, :k].to(dtype)
    return signs.mul_(2).sub_(1).div_(math.sqrt(k)).mT


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """The sum over r of left_r right_r^T; for a single row without a product of matrices."""
    if left.shape[1] == right.shape[1] == 1:
        return left.mT * right
    return left.mT @ right


def _widened(tensor: Tensor) -> Tensor:
    """In float32 where the dtype is narrower: sums of many products."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _hashed(place: Tensor, key: str) -> Tensor:
    """One hash per entry (splitmix64: additions and products of int64 wrap, as they should)."""
    start = int.from_bytes(
        hashlib.blake2b(key.encode(), digest_size=8).digest(), "big", signed=True
    )
    mixed = (place + 1) * _signed(0x9E3779B97F4A7C15) + start
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # A shift of a signed number drags the sign along; the mask makes it the unsigned one.
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return mixed


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
