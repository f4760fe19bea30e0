"""Evaluation of runs: judged modules, their summaries and comparisons, and the report."""

__all__: list[str] = []
