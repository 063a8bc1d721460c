"""The token history that rides in the KV cache, so that the table can be updated online.

The lookup is a pure function of the tokens so far. Kept as one more layer at the end of a
transformers cache, the history follows everything that generation does to the cache: reordering by
beam search, cropping by assisted decoding, repeating and resetting.
"""

import torch
from transformers.cache_utils import Cache, DynamicLayer


class TokenHistoryLayer(DynamicLayer):
    """Token ids in the place of keys and values, [batch, 1, length, 1] int64.

    Padding is stored as -1, which the lookup never matches.
    """

    # Without this a static cache would count as not compilable.
    is_compileable = True

    def append(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Add ids [batch, length] and return the whole history [batch, total length]."""
        ids = input_ids[:, None, :, None]
        keys, _ = self.update(ids, ids)
        return keys[:, 0, :, 0]


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
    history = layers[-1] if layers and isinstance(layers[-1], TokenHistoryLayer) else None
    if history is None:
        if cache.get_seq_length() > 0:
            raise ValueError(
                "The cache already holds tokens but no token history, so the document table "
                "cannot be continued. Start from an empty cache, or pass the table fields."
            )
        while len(layers) < num_layers:
            layers.append(cache.layer_class_to_replicate())
        history = TokenHistoryLayer()
        layers.append(history)
    return history.append(input_ids)
