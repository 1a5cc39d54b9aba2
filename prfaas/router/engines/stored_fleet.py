"""File with the last fleet that the managers named, so that a router can start while no manager answers."""

import os
import tempfile
from pathlib import Path

import msgspec

from prfaas import logs
from prfaas.router.engines.fleet import FleetPolicy, InstanceAddress

MAX_FILE_BYTES = 64 << 20
_log = logs.get("router.fleet")


class StoredFleet(msgspec.Struct):
    """Instances and policy as the managers last stated them."""

    policy: FleetPolicy
    instances: list[InstanceAddress]


def write(file: Path, fleet: StoredFleet) -> None:
    """Replace the file. A failure is logged, because the router can do without the file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(msgspec.json.encode(fleet))
        os.replace(new.name, file)
    except OSError as error:
        _log.warning("fleet.store_failed", file=str(file), error=str(error))


def read(file: Path) -> StoredFleet | None:
    """Return the stored fleet, or None if there is none or it cannot be read."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        return msgspec.json.decode(file.read_bytes(), type=StoredFleet)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # The errors of msgspec are ValueErrors.
        _log.warning("fleet.restore_failed", file=str(file), error=str(error))
        return None
