"""What makes a configuration valid. Each check raises `BadConfig` naming field and value."""

import re
from typing import TYPE_CHECKING

from tiered_kv.errors import BadConfig
from tiered_kv.inputs import LONGEST_S
from tiered_kv.keys import MAX_SECRET_BYTES
from tiered_kv.policies import SERVING
from tiered_kv.policies.admission import ADMISSION
from tiered_kv.policies.prefetch import PREFETCH
from tiered_kv.types import ALIGNMENT

if TYPE_CHECKING:
    from tiered_kv.config import Dram, Hbm, Nvme, Service

MIN_BYTES = 1 << 20
LONGEST_TTL_S = 10 * 365 * 86_400.0
ENGINES = ("auto", "threads", "io_uring")
TIMES = ("lease_ttl_s", "wake_deadline_s", "store_deadline_s", "move_deadline_s",
         "call_timeout_s", "recent_s")  # fmt: skip


def check_tier(name: str, tier: "Hbm | Dram | Nvme", stripes: int) -> None:
    """Watermarks, policy and slabs."""
    require(0 < tier.low <= tier.high <= 1, f"{name}: need 0 < low <= high <= 1, "
            f"not low {tier.low} and high {tier.high}")  # fmt: skip
    _one_of(f"{name}.policy", tier.policy, SERVING)
    slab = tier.slab_bytes
    if slab:
        require(slab <= tier.bytes, f"{name}.slab_bytes {slab} is more than {name}.bytes "
                f"{tier.bytes}")  # fmt: skip
        require(slab % (stripes * ALIGNMENT) == 0, f"{name}.slab_bytes {slab} is no multiple of "
                f"{stripes} x {ALIGNMENT}")  # fmt: skip


def check_hbm(hbm: "Hbm") -> None:
    """Size, device and the share that is verified."""
    require(hbm.bytes == 0 or hbm.bytes >= MIN_BYTES,
            f"hbm.bytes {hbm.bytes} is neither 0 nor at least 1MiB")  # fmt: skip
    require(0 <= hbm.verify <= 1, f"hbm.verify {hbm.verify} is not in [0, 1]")
    require(re.fullmatch(r"auto|cpu|cuda(:\d+)?", hbm.device) is not None,
            f"hbm.device {hbm.device!r} is not auto, cpu, cuda or cuda:N")  # fmt: skip


def check_memory(dram: "Dram") -> None:
    """Size, folder and the floor."""
    require(dram.bytes >= MIN_BYTES, f"dram.bytes {dram.bytes} is below 1MiB")
    require("\0" not in dram.folder, "dram.folder has a NUL in it")
    require(
        0 <= dram.restore_floor < 1, f"dram.restore_floor {dram.restore_floor} is not in [0, 1)"
    )


def check_nvme(nvme: "Nvme") -> None:
    """Size, folders, engine and admission."""
    require(nvme.bytes == 0 or nvme.bytes >= MIN_BYTES,
            f"nvme.bytes {nvme.bytes} is neither 0 nor at least 1MiB")  # fmt: skip
    require("\0" not in nvme.folder, "nvme.folder has a NUL in it")
    require(len(set(nvme.devices)) == len(nvme.devices),
            f"nvme.devices {list(nvme.devices)} names a folder twice")  # fmt: skip
    _one_of("nvme.admission", nvme.admission, ADMISSION)
    require(nvme.engine in ENGINES,
            f"nvme.engine {nvme.engine!r} is not one of {', '.join(ENGINES)}")  # fmt: skip
    require(1 <= nvme.queue_depth <= 1024,
            f"nvme.queue_depth {nvme.queue_depth} is not in 1..1024")  # fmt: skip


def check_service(service: "Service") -> None:
    """Names, the secret (whose value is in no message) and times."""
    require(service.namespace != "", "service.namespace '' is empty")
    try:
        secret = len(service.tenant_secret.encode())
    except UnicodeEncodeError:
        raise BadConfig("service.tenant_secret is not text in UTF-8") from None
    require(1 <= secret <= MAX_SECRET_BYTES,
            f"service.tenant_secret has {secret} bytes, not 1 to {MAX_SECRET_BYTES}")  # fmt: skip
    require(0 < service.gpu_fraction <= 1,
            f"service.gpu_fraction {service.gpu_fraction} is not in (0, 1]")  # fmt: skip
    _one_of("service.prefetch", service.prefetch, PREFETCH)
    require("\0" not in service.record, "service.record has a NUL in it")
    require(0 <= service.session_ttl_s <= LONGEST_TTL_S,
            f"service.session_ttl_s {service.session_ttl_s} is not in 0..{LONGEST_TTL_S:g} s"
            )  # fmt: skip
    for name in TIMES:
        value = getattr(service, name)
        require(0 < value <= LONGEST_S,
                f"service.{name} {value} is not above 0 and at most {LONGEST_S:g} s")  # fmt: skip
    for name in ("wake_deadline_s", "store_deadline_s"):
        value = getattr(service, name)
        require(value < service.call_timeout_s, f"service.{name} {value} must be shorter than "
                f"service.call_timeout_s {service.call_timeout_s}")  # fmt: skip


def require(holds: bool, sentence: str) -> None:
    """Raise `BadConfig` with the sentence unless it holds."""
    if not holds:
        raise BadConfig(sentence)


def _one_of(field: str, value: str, known: "dict[str, type]") -> None:
    require(value in known, f"{field} {value!r} is not one of {', '.join(sorted(known))}")
