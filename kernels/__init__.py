"""Typed tensor operations behind a registry of implementations.

Kept free of torch, triton and transformers imports and without a version
attribute: the ``transformers`` library probes a distribution of this name.
"""
