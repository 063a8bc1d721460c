"""Questions about speed, each answered by a ratio measured in one run."""
