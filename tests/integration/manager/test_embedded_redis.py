"""Supervised redis-server: restarts after every end, and refuses unusable directories."""

import asyncio
import sys
from pathlib import Path

import pytest

from prfaas.errors import ConfigError, RecordUnreachable
from prfaas.index.store.redis_store import RedisStore
from prfaas.manager.record.embedded_redis import EmbeddedRedis, find_server
from tests.support.deployment import kill
from tests.support.waiting import PATIENCE_SECONDS, POLL_SECONDS, until

RUDE = """#!{python}
import pathlib, socket, sys
words = [word.removeprefix("--") for word in sys.argv[1:]]
listener = socket.socket(socket.AF_UNIX)
listener.bind(dict(zip(words[::2], words[1::2]))["unixsocket"])
listener.listen()
peer, _ = listener.accept()
peer.recv(1, socket.MSG_PEEK)  # ends with the question unread
pathlib.Path({met!r}).touch()
"""


async def test_server_that_ends_during_a_ping_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    server, real, met = tmp_path / "bin" / "redis-server", find_server(), tmp_path / "met"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    server.symlink_to(real)
    redis = EmbeddedRedis(tmp_path / "data")
    await redis.start()
    server.unlink()
    server.write_text(RUDE.format(python=sys.executable, met=str(met)))
    server.chmod(0o700)
    kill(redis.pid)
    await until(met.exists, what="the server that hangs up")
    server.unlink()
    server.symlink_to(real)
    store = RedisStore(redis.url)
    await _until_it_answers(store)
    await store.close()
    await redis.close()


async def _until_it_answers(store: RedisStore) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                return await store.check()
            except RecordUnreachable:
                await asyncio.sleep(POLL_SECONDS)


async def test_data_is_readable_by_its_user_alone(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    for directory in (tmp_path / "open", tmp_path / "new"):
        redis = EmbeddedRedis(directory)
        await redis.start()
        assert not [path for path in directory.rglob("*") if path.stat().st_mode & 0o077]
        await redis.close()
    assert not (tmp_path / "new").stat().st_mode & 0o077


async def test_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"redis_directory: .*/file/redis"):
        await EmbeddedRedis(tmp_path / "file/redis").start()


async def test_directory_of_another_managers_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prfaas.manager.record.embedded_redis._LEAVE_SECONDS", 0.0)
    first, second = EmbeddedRedis(tmp_path), EmbeddedRedis(tmp_path)
    await first.start()
    with pytest.raises(ConfigError, match=f"redis_directory: another manager's Redis runs in {tmp_path}"):
        await second.start()
    await second.close()
    store = RedisStore(first.url)
    await store.check()
    await store.close()
    await first.close()
