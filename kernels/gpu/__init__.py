"""Operations as Triton kernels. One op is one file: kernel, launcher, shape contract.

Importing needs triton, but no card. Under ``TRITON_INTERPRET=1`` (set before
triton is imported) the launchers run on CPU tensors, slowly: that is what the
tests do.
"""
