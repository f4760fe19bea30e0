"""Learns from measured XLA programs which compiler configurations are fast."""

__version__ = '0.1.0'
