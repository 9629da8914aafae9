"""Keys and values of rows being decoded. Slot j of a row holds the key of its position j."""

from __future__ import annotations

import torch
from torch import Tensor


class Cache:
    """Preallocated buffers, one pair a layer, that a forward pass writes through `append`.

    A forward pass over B rows uses the first B rows. Call `begin` with its positions before it. Slots past a
    row's last token hold garbage, zeros at first: no query sees it, and real tokens overwrite it.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.rows, self.capacity = rows, capacity
        like = torch.zeros((), dtype=dtype, device=device)
        self._keys = [_zeros(like, rows, capacity, kv_heads, head_dim) for _ in range(layers)]
        self._values = [_zeros(like, rows, capacity, kv_heads, head_dim) for _ in range(layers)]
        self._rows = torch.arange(rows, device=device)[:, None]
        self._slots = self._rows[:0]
        self._width = 0

    def begin(self, positions: Tensor, width: int | None = None) -> None:
        """Say where the next forward pass writes: [B, T] positions, and how many slots its queries may see.

        Without a `width` it is read off the positions, which on a GPU waits for it.
        """
        self._width = int(positions.max()) + 1 if width is None else width
        if self._width > self.capacity:
            self.grow(max(self._width, 2 * self.capacity))
        self._slots = positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, kv_heads, T, head_dim]; give views of what is seen, [B, kv_heads, width, head_dim]."""
        at = (self._rows[: len(k)], self._slots)
        self._keys[layer][at], self._values[layer][at] = k.transpose(1, 2), v.transpose(1, 2)
        return self.seen(layer, len(k))

    def seen(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Views of what the first rows see, [rows, kv_heads, width, head_dim]."""
        keys, values = (
            buffers[layer][:rows, : self._width].transpose(1, 2) for buffers in (self._keys, self._values)
        )
        return keys, values

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """A layer's whole buffers, [rows, capacity, kv_heads, head_dim]."""
        return self._keys[index], self._values[index]

    def grow(self, capacity: int) -> None:
        """Make room for more positions. Views given out before stay with the old buffers."""
        for buffers in (self._keys, self._values):
            for layer, buffer in enumerate(buffers):
                rows, old, heads, size = buffer.shape
                buffers[layer] = _zeros(buffer, rows, capacity, heads, size)
                buffers[layer][:, :old] = buffer
        self.capacity = capacity

    def take(self, rows: Tensor, width: int, capacity: int) -> Cache:
        """A copy of some rows: their first `width` positions, with room for `capacity`."""
        like = self._keys[0]
        heads, size = like.shape[2:]
        copy = Cache(len(self._keys), len(rows), heads, capacity, size, like.dtype, like.device)
        copy.put(torch.arange(len(rows), device=rows.device), self, rows, width)
        return copy

    def put(self, at: Tensor, source: Cache, rows: Tensor, width: int) -> None:
        """Copy the first `width` positions of `rows` of `source`, which may repeat, to rows `at` of this one.

        This is how one prefilled prompt reaches its whole group, and, with itself as source, how gaps close.
        """
        if width > self.capacity:
            self.grow(max(width, 2 * self.capacity))
        for mine, theirs in ((self._keys, source._keys), (self._values, source._values)):
            for target, given in zip(mine, theirs, strict=True):
                target[:, :width].index_copy_(0, at, given[:, :width].index_select(0, rows))


def _zeros(like: Tensor, rows: int, capacity: int, heads: int, size: int) -> Tensor:
    """[rows, capacity, heads, size]; on a CPU a head's positions lie together, as its batched products want them.

    Zeros, not empty: an invisible key has weight 0, and 0 x NaN is NaN.
    """
    if like.device.type == "cpu":
        return like.new_zeros(rows, heads, capacity, size).transpose(1, 2)
    return like.new_zeros(rows, capacity, heads, size)
