"""Every error that tiered_kv raises.

    TieredKVError
    ├── BadInput(ValueError)      a caller's value cannot be used; nothing changed
    │   ├── BadConfig             a field of the configuration
    │   ├── BadLayout             shape, dtype or layout differ from what was agreed
    │   ├── BadSession            a session id that cannot be one
    │   └── UnknownName           a policy, engine or tier that is not registered
    ├── UnknownSession(KeyError)  no session of that id is held here
    ├── UnsupportedCache          a model whose cache cannot be saved exactly
    ├── StaleHandle               a reservation, lease or incarnation that has ended
    ├── DoesNotFit                memory, /dev/shm, memlock or disk is too small; has the numbers
    ├── FolderInUse               another live service owns the NVMe folder
    ├── TierBroken                a medium failed; its copies are misses until it is probed back in
    └── Unreachable               a process of the service does not answer

A miss is never an exception: `lookup`, `lease` and `wake` answer with what they have.
"""


class TieredKVError(Exception):
    """Root of all errors of this package."""

    def __str__(self) -> str:
        # KeyError would print its argument with repr(); ours are sentences.
        return str(self.args[0]) if self.args else type(self).__name__


class BadInput(TieredKVError, ValueError):
    """A value from the caller that cannot be used. The message names it; nothing changed."""


class BadConfig(BadInput):
    """A configuration field is unknown, malformed or contradicts another one."""


class BadLayout(BadInput):
    """Shape, dtype, size or fingerprint differ from the layout that was agreed."""


class BadSession(BadInput):
    """A session id that is empty, too long or has control characters."""


class UnknownName(BadInput):
    """A name that is not in a registry. The message lists the known ones."""


class UnknownSession(TieredKVError, KeyError):
    """No session of that id is known here."""


class UnsupportedCache(TieredKVError, TypeError):
    """A model's cache has layers that cannot be saved and resumed exactly."""


class StaleHandle(TieredKVError):
    """A reservation, lease or incarnation that is no longer valid. What it named is untouched."""


class DoesNotFit(TieredKVError):
    """What was asked for exceeds a limit of this machine. The message has both numbers."""


class FolderInUse(TieredKVError):
    """The NVMe folder is locked by another live service."""


class TierBroken(TieredKVError):
    """A medium failed as a whole. Its copies count as misses until it is probed back in."""


class Unreachable(TieredKVError):
    """A process of the service did not answer in time. The caller goes on with a miss."""
