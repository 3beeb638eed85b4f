"""Devices that runs are planned for: dense rates, memory and bandwidth to other devices."""

from dataclasses import dataclass

from heedful.errors import UserError
from heedful.plugins import nearest

CPU = "cpu"


@dataclass(frozen=True)
class Accelerator:
    """A GPU by its data sheet.

    Attributes:
        flops: dense products in 16 bits with fp32 sums, FLOP/s (a data sheet's number "with
            sparsity" is halved).
        fp32_flops: dense FLOP/s of fp32 products, without TF32.
        memory: bytes.
        link: bytes/s that one GPU sends to others of its machine, in one direction.
        source: data sheet.
        has_bf16: False: the products in 16 bits are those of fp16 alone.
    """

    name: str
    flops: float
    fp32_flops: float
    memory: float
    link: float
    source: str
    has_bf16: bool = True

    def resolve_precision(self, precision: str) -> str:
        """The precision of a run's steps on it, as `heedful.training.optimizer.resolve_precision`.

        Raises:
            UserError: bf16, which the GPU does not support.
        """
        if precision == "auto":
            return "bf16" if self.has_bf16 else "fp16"
        if precision == "bf16" and not self.has_bf16:
            raise UserError(
                f"gpu={self.name} does not support bf16; add training.precision=fp16 (or fp32), or "
                "give another gpu"
            )
        return precision


ACCELERATORS = {
    gpu.name: gpu
    for gpu in (
        Accelerator("h200", 989e12, 67e12, 141e9, 450e9, "NVIDIA H200 data sheet, SXM"),
        Accelerator("h100", 989e12, 67e12, 80e9, 450e9, "NVIDIA H100 data sheet, SXM5"),
        Accelerator("h100-pcie", 756e12, 51e12, 80e9, 64e9, "NVIDIA H100 data sheet, PCIe 5"),
        Accelerator("a100", 312e12, 19.5e12, 80e9, 300e9, "NVIDIA A100 data sheet, SXM4 80 GB"),
        Accelerator("a100-40gb", 312e12, 19.5e12, 40e9, 300e9, "NVIDIA A100 data sheet, SXM4"),
        Accelerator("l40s", 362e12, 91.6e12, 48e9, 32e9, "NVIDIA L40S data sheet, PCIe 4"),
        Accelerator("l4", 121e12, 30.3e12, 24e9, 32e9, "NVIDIA L4 data sheet, PCIe 4"),
        Accelerator("a10g", 70e12, 35e12, 24e9, 32e9, "AWS EC2 G5 and NVIDIA A10G data sheets"),
        Accelerator("v100", 125e12, 15.7e12, 32e9, 150e9, "NVIDIA V100 data sheet, SXM2", False),
        Accelerator("t4", 65e12, 8.1e12, 16e9, 16e9, "NVIDIA T4 data sheet, PCIe 3", False),
        Accelerator("rtx4090", 165e12, 82.6e12, 24e9, 32e9, "NVIDIA Ada architecture paper"),
        Accelerator("rtx3090", 71e12, 35.6e12, 24e9, 32e9, "NVIDIA GA102 architecture paper"),
    )
}


def find_accelerator(name: str) -> Accelerator | None:
    """The GPU of this name; None for `cpu`. Raises UserError for any other name."""
    if name == CPU:
        return None
    if name not in ACCELERATORS:
        known = [CPU, *ACCELERATORS]
        raise UserError(f"gpu={name}: unknown; {nearest(name, known)}; known: {', '.join(known)}")
    return ACCELERATORS[name]
