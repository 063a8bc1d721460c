"""The token history that rides in the KV cache, so that the table can be updated online.

The lookup is a pure function of the tokens so far. Kept as one more layer at the end of a
transformers cache, the history follows everything that generation does to the cache: reordering by
beam search, cropping by assisted decoding, repeating and resetting.
"""

import torch
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer


class TokenHistoryLayer(DynamicLayer):
    """Token ids in the place of keys and values, [batch, 1, length, 1] int64; padding is -1."""

    # Without this a cache with other static layers would count as not compilable.
    is_compileable = True

    def append(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Add ids [batch, length]; returns the history [batch, total length]."""
        ids = input_ids[:, None, :, None]
        keys, _ = self.update(ids, ids)
        return keys[:, 0, :, 0]


class StaticTokenHistoryLayer(StaticLayer):
    """The same for a StaticCache: a buffer of fixed length, so that decoding can be compiled."""

    def append(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Add ids [batch, length]; returns the history, left-padded with -1 to the buffer's length.

        The lookup depends on relative positions only, so left padding changes nothing.
        """
        ids = input_ids[:, None, :, None]
        keys, _ = self.update(ids, ids)
        position = torch.arange(self.max_cache_len, device=ids.device)
        count = self.cumulative_length
        rolled = keys[:, 0, (position + count) % self.max_cache_len, 0]
        return torch.where(position < self.max_cache_len - count, -1, rolled)


def append_to_history(cache: Cache, num_layers: int, input_ids: torch.Tensor) -> torch.Tensor:
    """Add new ids to the history in a cache, and return the history [batch, total length].

    Args:
        cache: the cache of this model, fresh or in use. It gains one layer after `num_layers`.
        num_layers: the model's number of blocks.
        input_ids: [batch, length] ids new in this forward; -1 for padding.

    Raises:
        ValueError: if the cache has no list of layers (continuous batching), or if it was filled
            by a model without a history.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ValueError(
            f"A document table needs a cache with a list of layers; {type(cache).__name__} has "
            "none (continuous batching is not supported). Use generate() with its default cache."
        )
    if not layers or not isinstance(layers[-1], TokenHistoryLayer | StaticTokenHistoryLayer):
        if cache.get_seq_length() > 0:
            raise ValueError(
                "The cache already holds tokens but no token history, so the document table "
                "cannot be continued. Start from an empty cache, or pass the table fields."
            )
        while len(layers) < num_layers:
            layers.append(cache.layer_class_to_replicate())
        # The last block's window is the whole row: its layer is the longest.
        last = layers[num_layers - 1]
        if isinstance(last, StaticLayer):
            layers.append(StaticTokenHistoryLayer(last.max_cache_len))
        else:
            layers.append(TokenHistoryLayer())
    history: torch.Tensor = layers[-1].append(input_ids)
    return history
