"""Every Redis key of the project is made here; docs/redis-keys.md says what lies under each.

Keys of one cluster share a hash tag, so that its stream, lease and snapshot lie on one slot of a Redis Cluster.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from prfaas.types import ClusterName


@dataclass(frozen=True)
class Keys:
    """The keys of one deployment, which `namespace` tells from others on the same Redis."""

    namespace: str = "prfaas"

    def clusters(self) -> str:
        """Set: names of all clusters that ever registered a node."""
        return f"{self.namespace}:clusters"

    def lease(self, cluster: ClusterName) -> str:
        """Hash owner, epoch; expires: who may write this cluster's record."""
        return self._of(cluster, "lease")

    def epoch(self, cluster: ClusterName) -> str:
        """Number: the epoch of the last lease, for ever growing."""
        return self._of(cluster, "epoch")

    def events(self, cluster: ClusterName) -> str:
        """Stream: what changed, in order; entry ids are <epoch>-<number>."""
        return self._of(cluster, "events")

    def snapshot(self, cluster: ClusterName) -> str:
        """Hash covers, chunks: the last complete snapshot and the stream id that it includes."""
        return self._of(cluster, "snapshot")

    def snapshot_chunks(self, cluster: ClusterName, generation: str) -> str:
        """List: the records of one snapshot; expires until the snapshot is complete."""
        return self._of(cluster, f"snapshot:{generation}")

    def figures(self, cluster: ClusterName) -> str:
        """String, expires: signs of life, links and loads of the last second."""
        return self._of(cluster, "figures")

    def plan(self, cluster: ClusterName) -> str:
        """String, expires: threshold and roles that the planner has chosen."""
        return self._of(cluster, "plan")

    def session(self, tenant: str, session: str) -> str:
        """String, expires: where a conversation's KV lies. Hashed, since its name comes from a caller."""
        digest = hashlib.sha256(f"{len(tenant)}:{tenant}{session}".encode()).hexdigest()[:32]
        return f"{self.namespace}:session:{digest}"

    def _of(self, cluster: ClusterName, what: str) -> str:
        return f"{self.namespace}:{{{cluster}}}:{what}"
