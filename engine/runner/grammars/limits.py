"""What a grammar may cost before it is refused, and its request with it. Picklable; knows no library."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds on one grammar and on one output under it.

    Attributes:
        compile_s_max: seconds of a processor that compiling it may take; waiting is not compiling.
        mask_s_max: seconds of a processor that all masks of one output may take.
        bytes_max: memory that it and all outputs under it may take beyond that of the library.
        num_idle_max: compiled grammars that are kept while no output follows them.
    """

    compile_s_max: float = 10.0
    mask_s_max: float = 10.0
    bytes_max: int = 512 * 1024 * 1024
    num_idle_max: int = 32
