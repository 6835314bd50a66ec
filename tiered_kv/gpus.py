"""What NVML says about the GPUs of this machine. A machine without one is normal."""

from dataclasses import dataclass

import pynvml

# Bytes per second of one lane in one direction after line coding, by PCIe generation
# (2.5, 5 GT/s with 8b/10b; 8, 16, 32 GT/s with 128b/130b; 64 GT/s with 242B/256B flits).
_LANE_BYTES_PER_S = {
    1: 0.250e9,
    2: 0.500e9,
    3: 0.985e9,
    4: 1.969e9,
    5: 3.938e9,
    6: 7.563e9,
}


@dataclass(frozen=True)
class Gpu:
    """One device. Fields that its driver does not tell are None.

    An idle GPU trains its link down: the current generation matters only under load.
    """

    index: int
    name: str
    total_bytes: int | None
    free_bytes: int | None
    pcie_generation: int | None
    pcie_width: int | None
    pcie_generation_max: int | None
    pcie_width_max: int | None
    pcie_bytes_per_s: float | None
    """In one direction at the largest generation and width: an upper bound for copies."""


def link_bytes_per_s(generation: int | None, width: int | None) -> float | None:
    """Of a PCIe link in one direction; None for an unknown generation."""
    lane = _LANE_BYTES_PER_S.get(generation or 0)
    return lane * width if lane is not None and width else None


def gpus() -> tuple[tuple[Gpu, ...], str]:
    """All GPUs, and a sentence about what was found. Never raises for a missing driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"no GPU is visible: {error}"
    try:
        found = tuple(_gpu(n) for n in range(pynvml.nvmlDeviceGetCount()))
        driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return (), f"the NVIDIA driver failed: {error}"
    finally:
        pynvml.nvmlShutdown()
    return found, f"{len(found)} GPUs, NVIDIA driver {driver}"


def _gpu(index: int) -> Gpu:
    device = pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str) -> int | None:
        try:
            return int(getattr(pynvml, name)(device))
        except pynvml.NVMLError:  # virtual GPUs and integrated ones have no link
            return None

    total: int | None = None
    free: int | None = None
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        total, free = int(memory.total), int(memory.free)
    except pynvml.NVMLError:
        pass  # GPUs that share the host's memory have none of their own
    generation_max = ask("nvmlDeviceGetMaxPcieLinkGeneration")
    width_max = ask("nvmlDeviceGetMaxPcieLinkWidth")
    return Gpu(
        index=index,
        name=str(pynvml.nvmlDeviceGetName(device)),
        total_bytes=total,
        free_bytes=free,
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_generation_max=generation_max,
        pcie_width_max=width_max,
        pcie_bytes_per_s=link_bytes_per_s(generation_max, width_max),
    )
