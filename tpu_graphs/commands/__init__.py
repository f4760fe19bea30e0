"""The commands that need neither Beam nor training, one file each; run as `tpu-graphs NAME`."""

__all__: list[str] = []
