"""From text to a chunk set, and from a chunk set to the rows that a model sees.

Knows tokens, not models: nothing here imports torch. `build`, `verify` and `describe` are the
commands; `chunk_set`, `rows`, `lookup` and `target_classes` are what training and scoring import.
"""
