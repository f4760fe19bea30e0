"""The steps of `pipelines/convert.py`: raw files -> a dataset directory."""

__all__: list[str] = []
