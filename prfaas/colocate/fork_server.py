"""Fork server: loads the model once, and forks the decode and prefill workers from the loaded process.

The workers share its weights as copy-on-write pages, packed copies inside of kernel libraries included. Their KV cache is
shared memory that the server holds. The server itself computes nothing after loading. It loads with one OpenMP thread,
since a process that has started an OpenMP team cannot be forked.

    python -m prfaas.colocate.fork_server SOCKET
"""

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing import Lock
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from prfaas import logs
from prfaas.colocate import prefill_worker
from prfaas.colocate.channel import Channel, ChannelServer
from prfaas.colocate.cores import all_cores, move_threads, resize_team
from prfaas.colocate.messages import DecodeHello, PrefillHello, Ready, Refused
from prfaas.colocate.serve import REFUSED_EXIT

log = logs.get("colocate.fork_server")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class SharedKvMemory(TorchFunctionMode):
    """Has vLLM's allocation of the KV cache (`torch.zeros` of int8) return shared memory."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.zeros or kwargs.get("dtype") is not torch.int8:
            return function(*args, **kwargs)
        (num_bytes,) = args
        if os.fstat(self._descriptor).st_size < num_bytes:
            os.ftruncate(self._descriptor, num_bytes)
        return torch.frombuffer(mmap.mmap(self._descriptor, num_bytes), dtype=torch.int8)


class Workers:
    """Loaded model, and the workers forked from it. One generation of workers lives at a time."""

    def __init__(self, server: ChannelServer) -> None:
        self._server = server
        self._loaded: WorkerWrapperBase | None = None
        self._kv_memory = -1
        self._children: list[int] = []

    def serve(self, channel: Channel) -> None:
        """Handle one connection: fork the worker that it asks for, which takes the connection over."""
        self._children = [child for child in self._children if os.waitpid(child, os.WNOHANG) == (0, 0)]
        try:
            hello = channel.receive()
            if isinstance(hello, DecodeHello):
                self._begin_generation(hello)
        except (EOFError, OSError):
            return
        except Exception as error:
            traceback.print_exc()
            channel.send(Refused(f"{type(error).__name__}: {error}"))
            return
        self._fork(channel, hello)

    def _begin_generation(self, hello: DecodeHello) -> None:
        """Load the model at the first request; end the workers of a decode engine that died."""
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._children.clear()
        if self._kv_memory >= 0:
            os.close(self._kv_memory)
        self._kv_memory = os.memfd_create("prfaas-kv")
        if self._loaded is None:
            os.environ.update(hello.environment)
            self._loaded = _load(hello.vllm_config)

    def _fork(self, channel: Channel, hello: DecodeHello | PrefillHello) -> None:
        assert self._loaded is not None
        child = os.fork()
        if child:
            self._children.append(child)
            channel.close()
            return
        try:
            self._server.close()
            _run(self._loaded, channel, hello, self._kv_memory)
        except (EOFError, OSError):
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


def _load(vllm_config: Any) -> WorkerWrapperBase:
    wrapper = WorkerWrapperBase(rpc_rank=0)
    arguments = {
        "vllm_config": vllm_config,
        "local_rank": 0,
        "rank": 0,
        "distributed_init_method": get_file_store_init_method(),
        "is_driver_worker": True,
        "shared_worker_lock": Lock(),
    }
    wrapper.init_worker(all_kwargs=[arguments])
    wrapper.init_device()
    wrapper.load_model()
    current_platform.update_block_size_for_backend(vllm_config)
    if wrapper.worker._should_warm_up_model():
        with set_current_vllm_config(vllm_config):
            wrapper.worker.model_runner.warming_up_model()
    log.info("model.loaded", model=vllm_config.model_config.model)
    return wrapper


def _run(wrapper: WorkerWrapperBase, channel: Channel, hello: DecodeHello | PrefillHello, kv_memory: int) -> NoReturn:
    """Be the worker, in the forked process."""
    _set_up_process(b"prfaas-prefill" if isinstance(hello, PrefillHello) else b"prfaas-decode")
    resize_team(len(all_cores()))
    move_threads(all_cores())
    with _shared_kv_memory(wrapper, kv_memory):
        if isinstance(hello, PrefillHello):
            wrapper.vllm_config.kv_transfer_config = None
            wrapper.update_max_model_len(hello.max_model_len)
            wrapper.initialize_from_config([hello.kv_cache_config])
            prefill_worker.run(wrapper, channel, hello.scratch_blocks)
        channel.send(Ready(os.getpid()))
        _answer_calls(wrapper, channel)


@contextlib.contextmanager
def _shared_kv_memory(wrapper: WorkerWrapperBase, kv_memory: int) -> Iterator[None]:
    runner = wrapper.worker.model_runner
    allocate = runner.initialize_kv_cache_tensors

    def allocate_shared(*args: Any, **kwargs: Any) -> Any:
        return allocate(*args, **{**kwargs, "kv_cache_allocation_context": SharedKvMemory(kv_memory)})

    runner.initialize_kv_cache_tensors = allocate_shared
    yield


def _answer_calls(wrapper: WorkerWrapperBase, channel: Channel) -> NoReturn:
    """Run the executor's calls in order. A call's exception is its answer."""
    while True:
        method, args, kwargs = channel.receive()
        try:
            answer = run_method(wrapper, method, args, kwargs)
        except Exception as error:
            traceback.print_exc()
            answer = error
        channel.send(answer)


def _set_up_process(name: bytes) -> None:
    """Name this process for operators, and end it with its parent."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_NAME, name)


def main() -> None:
    logs.setup("colocate")
    if not current_platform.is_cpu():  # A process that has started CUDA cannot be forked.
        log.error("device.refused", reason=f"colocated instances run on CPUs, not on {current_platform.device_name}")
        sys.exit(REFUSED_EXIT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = ChannelServer(Path(sys.argv[1]))
    workers = Workers(server)
    while True:
        workers.serve(server.accept())


if __name__ == "__main__":
    main()
