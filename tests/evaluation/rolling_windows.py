"""lm-evaluation-harness's rolling windows, transcribed from its documented rule.

`loglikelihood_rolling` scores every token of a document once: the first window is the prefix token
and the first tokens; each later one starts with the last `context_len` tokens before the first that
is still to be scored (with 1, the default: the token just before it).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def rolling_windows(
    tokens: list[int], prefix_token_id: int, max_length: int, context_len: int = 1
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (inputs, the targets that are scored: as many last positions of the inputs)."""
    scored = 0
    while scored < len(tokens):
        step = max_length if scored == 0 else max_length - context_len + 1
        end = min(scored + step, len(tokens))
        stream = [prefix_token_id, *tokens]
        start = 0 if scored == 0 else max(end - max_length, 0)
        yield stream[start:end], tokens[scored:end]
        scored = end


def rolling_nats(model, tokens: list[int], prefix_token_id: int, max_length: int) -> float:
    """Summed loss of a document, in nats."""
    total = 0.0
    for inputs, targets in rolling_windows(tokens, prefix_token_id, max_length):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([inputs]), use_cache=False).logits[0]
        scores = logits[-len(targets) :].log_softmax(-1)
        total -= float(scores[torch.arange(len(targets)), targets].double().sum())
    return total
