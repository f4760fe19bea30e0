"""Runners of pipelines: local modes of Beam, a Dask cluster, and files on any file system."""

__all__: list[str] = []
