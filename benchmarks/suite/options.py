"""What all benchmarks are told."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """`scratch`: a folder for models and runs, kept between cells. `quick`: tiny sizes, to see that all still runs."""

    scratch: Path
    cores: list[int]
    quick: bool = False
    gpu_share: float | None = None
    """Part of the GPU's memory that vLLM takes; None: everything is on the CPU."""

    def rounds(self, usual: int) -> int:
        """Number of rounds of a measurement."""
        return 1 if self.quick else usual
