"""Which layouts each peer's process has accepted: a later open to the same process need not describe them again."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class AcceptedLayouts:
    """Fingerprints by peer. Another process at the same peer, or one that cannot be named, knows nothing."""

    def __init__(self) -> None:
        self._by_peer: dict[str, tuple[bytes, set[bytes]]] = {}  # the process, and what it has accepted

    def knows(self, peer: str, process: bytes | None, fingerprints: Collection[bytes]) -> bool:
        """Whether this process of the peer has accepted all of them."""
        its_process, accepted = self._by_peer.get(peer, (None, set()))
        return process is not None and process == its_process and accepted.issuperset(fingerprints)

    def accept(self, peer: str, process: bytes, fingerprints: Iterable[bytes]) -> None:
        """This process has accepted them; what another one accepted before it is forgotten."""
        if self._by_peer.get(peer, (b"", set()))[0] != process:
            self._by_peer[peer] = process, set()
        self._by_peer[peer][1].update(fingerprints)

    def forget(self, peer: str, fingerprints: Iterable[bytes]) -> None:
        """The peer has not got these, or not any more."""
        if peer in self._by_peer:
            self._by_peer[peer][1].difference_update(fingerprints)
