"""Learning rate, momentum and weight decay as pure functions of the update (reference recipe)."""


def lr_multiplier(update: int, num_updates: int, cooldown_fraction: float = 0.5) -> float:
    """Factor of every learning rate: 1, then linear to 0 over the last part of the run.

    Args:
        update: 0-based.
        num_updates: length of the run.
        cooldown_fraction: the part of the run in which the rate falls.
    """
    progress = update / num_updates
    if progress < 1 - cooldown_fraction or cooldown_fraction == 0:
        return 1.0
    return (1 - progress) / cooldown_fraction


def muon_momentum(update: int, start: float = 0.85, end: float = 0.95, ramp: int = 300) -> float:
    """Muon's momentum, linear from `start` to `end` over the first `ramp` updates."""
    fraction = min(update / ramp, 1.0) if ramp else 1.0
    return (1 - fraction) * start + fraction * end


def muon_weight_decay(update: int, num_updates: int, start: float = 0.2) -> float:
    """Muon's weight decay, linear from `start` to 0 over the run."""
    return start * (1 - update / num_updates)
