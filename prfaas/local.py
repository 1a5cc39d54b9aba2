"""Files of a deployment on one machine that no setting names: the secret and the agent's socket."""

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from prfaas.grants import MIN_SECRET_BYTES

SYSTEM_DIRECTORY = Path("/run/prfaas")


def state_directory() -> Path:
    """Return the user's directory for state, by the XDG Base Directory Specification."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "prfaas"


def secret_file() -> Path:
    """Return the file of the user's own secret. Create the file if there is none.

    Commands that start at the same time agree on one secret: only one of their links succeeds.

    Raises:
        OSError: the state directory cannot be written.
    """
    path = state_directory() / "secret"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # Its mode is 600.
            file.write(secrets.token_bytes(MIN_SECRET_BYTES))
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    return path


def agent_socket() -> Path:
    """Return where an agent and engines of this user meet: the system's directory if it is writable, else the user's."""
    is_there = SYSTEM_DIRECTORY.exists()
    is_usable = os.access(SYSTEM_DIRECTORY if is_there else SYSTEM_DIRECTORY.parent, os.W_OK)
    return (SYSTEM_DIRECTORY if is_usable else state_directory()) / "agent.sock"
