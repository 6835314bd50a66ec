"""What makes two processes neighbours: one kernel and one shared memory folder."""

import os
from pathlib import Path

from tiered_kv.liveness import private_folder
from tiered_kv.memory import text_of


def host_identity(shm_folder: Path) -> str:
    """The same for two processes exactly when both see the same `shm_folder`.

    Not the host's name: two containers of one machine have other names or the same one, and may
    or may not share /dev/shm. The kernel's boot id, device and inode of the folder decide.
    Creates the folder where it is missing. Raises `BadInput` as `liveness.private_folder` does.
    """
    info = os.stat(private_folder(shm_folder))
    boot = text_of(Path("/proc/sys/kernel/random/boot_id")).strip() or "unknown-boot"
    return f"{boot}:{info.st_dev}:{info.st_ino}"
