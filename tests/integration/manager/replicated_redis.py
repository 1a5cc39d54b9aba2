"""Redis master with a replica and a Sentinel, each a process."""

import subprocess
from pathlib import Path

import redis

from prfaas.manager.record.embedded_redis import find_server
from tests.support.waiting import wait_until
from tools.free_ports import free_address

SENTINEL = """
port {port}
sentinel monitor main 127.0.0.1 {master} 1
sentinel down-after-milliseconds main 60000
sentinel failover-timeout main 3000
"""


class ReplicatedRedis:
    """Master, replica and Sentinel, each a process on a free port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ports = [int(free_address().rpartition(":")[2]) for _ in range(3)]
        master, replica, sentinel = self.ports
        self.master = self._start("--port", str(master), "--save", "")
        self._others = [self._start("--port", str(replica), "--save", "", "--replicaof", "127.0.0.1", str(master))]
        self.url = f"redis+sentinel://127.0.0.1:{sentinel}/main"

    def watch(self) -> None:
        """Start the Sentinel once there is a replica: it asks for replicas at the start, and then each 10 s."""
        wait_until(self._is_copied, what="the replica")
        config = self._directory / "sentinel.conf"
        config.write_text(SENTINEL.format(port=self.ports[2], master=self.ports[0]))
        self._others.append(self._start(str(config), "--sentinel"))
        wait_until(self._is_watched, what="the Sentinel")

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([find_server(), *arguments], cwd=self._directory, stdout=subprocess.DEVNULL)

    def _is_copied(self) -> bool:
        """Return whether the replica has the master's data."""
        try:
            with redis.Redis(port=self.ports[1]) as replica:
                return bool(replica.info("replication")["master_link_status"] == "up")
        except redis.RedisError:
            return False

    def _is_watched(self) -> bool:
        """Return whether the Sentinel knows the replica."""
        try:
            with redis.Redis(port=self.ports[2]) as sentinel:
                return bool(sentinel.execute_command("SENTINEL", "REPLICAS", "main"))
        except redis.RedisError:
            return False

    def give_up_the_master(self) -> None:
        """Make the Sentinel act at once. Before, the silence of a slow machine must not count as a death."""
        with redis.Redis(port=self.ports[2]) as sentinel:
            sentinel.execute_command("SENTINEL", "SET", "main", "down-after-milliseconds", 200)

    def close(self) -> None:
        for process in (self.master, *self._others):
            process.kill()
            process.wait()
