"""Training: the trainer and its loop, checkpoints, strategies, signals and run directories."""

__all__: list[str] = []
