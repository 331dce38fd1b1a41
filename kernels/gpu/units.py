"""In what unit widths and strides are given to a kernel.

A kernel may load sixteen bytes at once only where it can prove that a row
begins at a multiple of them. It can when it multiplies a width by ``UNIT = 16``
itself. (Triton would find out by looking at each number at launch, and compile
another kernel for each outcome; so each kernel has two forms, both checked
ahead of time.)
"""

UNITS: tuple[int, ...] = (16, 1)


def unit_of(*numbers: int) -> int:
    """16 where it divides all of ``numbers``, else 1."""
    return 1 if any(number % 16 for number in numbers) else 16
