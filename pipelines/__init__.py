"""Apache Beam pipelines, one runnable file each; their steps are in the folders."""

__all__: list[str] = []
