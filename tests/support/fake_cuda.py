"""A GPU that computes nothing, for fake tensors on `cuda` on a machine without one.

Autograd asks C++ for streams and devices, even for tensors without data. A small library, compiled once, answers in
place of a GPU; it must be loaded before torch. This module answers the questions that Python asks torch.cuda.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensor

from torchtitan_cp.planner.devices import ACCELERATORS

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
# Operators of which a CUDA build has one kernel, while a device without a kernel gets several operations, which keep
# more for their backward.
ONE_KERNEL = ("_fused_rms_norm", "silu_backward", "mish_backward")
_library = torch.library.Library("aten", "IMPL")  # its registrations last as long as it does


def library_path(torch_folder: Path) -> Path:
    """Path in the user's cache. The library is linked to one installation of torch, so each has its own."""
    built_from = SOURCE.read_bytes() + f"{torch.__version__} {torch_folder}".encode()
    return Path("~/.cache/torchtitan-cp").expanduser() / f"fake_cuda-{hashlib.sha256(built_from).hexdigest()[:16]}.so"


def build_library() -> Path:
    """Path of the library for this installation of torch; if it is not in the cache, it is compiled in ten seconds.

    Raises:
        RuntimeError: there is no C++ compiler, or it fails.
    """
    root = Path(torch.__file__).parent
    if (library := library_path(root)).exists():
        return library
    compiler = shutil.which("c++") or shutil.which("g++")
    if sys.platform != "linux" or not compiler:
        raise RuntimeError("a GPU that is not there needs Linux and a C++ compiler: install g++ (11 or later)")
    flags = ["-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    paths = [f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-ltorch_cpu", "-lc10"]
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [compiler, *flags, str(SOURCE), *paths, "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{SOURCE.name} does not compile: {done.stderr[-500:]}")
    unfinished.replace(library)
    return library


class _Stream(contextlib.nullcontext[Any]):
    """A stream without work, and an event on it."""

    device, stream_id, device_index, device_type = torch.device("cuda", 0), 0, 0, 1

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(self)

    def __getattr__(self, name: str) -> Any:
        return _answer({"query": True, "elapsed_time": 0.0, "record_event": self}.get(name))


class _Generator(torch.Generator):
    """A generator on the CPU, whatever device is asked for, because nothing is drawn from it."""

    def __new__(cls, device: Any = None) -> "_Generator":
        return super().__new__(cls)


def _answer(value: Any) -> Any:
    return lambda *_, **__: value


def use_fake_cuda(device: str) -> None:
    """Make this process believe in one GPU. The program is restarted once, so that the library is loaded before torch.

    Args:
        device: a name of planner/devices.py, e.g. "h100-80g".

    Raises:
        RuntimeError: as `build_library`.
    """
    library = str(build_library())
    if library not in os.environ.get("LD_PRELOAD", ""):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"LD_PRELOAD": library})
    ctypes.CDLL(library).use_fake_guard()
    chip, stream, capability = device.partition("-")[0].upper(), _Stream(), ACCELERATORS[device].capability
    assert capability is not None
    memory = {"total_memory": int(ACCELERATORS[device].memory_bytes)}
    properties = SimpleNamespace(name=chip, major=capability[0], minor=capability[1], **memory)
    answers = {
        "current_stream": stream, "default_stream": stream, "stream": contextlib.nullcontext(), "set_stream": None,
        "is_current_stream_capturing": False, "set_device": None, "synchronize": None, "_lazy_init": None,
        "current_device": 0, "device_count": 1, "is_available": True, "is_initialized": True,
        "get_device_name": f"NVIDIA {chip}", "get_device_capability": capability,
        "get_device_properties": properties, "set_rng_state": None,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(torch.cuda, name, _answer(value))
    torch.cuda.Stream = torch.cuda.Event = _Stream  # type: ignore[misc, assignment]
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.Generator = _Generator  # type: ignore[misc]
    torch.Tensor.record_stream = _answer(None)  # type: ignore[method-assign]
    fake_tensor.init_gpu_context = _answer(None)
    for name in ONE_KERNEL:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            _library.impl(name, _answer(None), "CUDA")  # never called, since fake tensors have results of their own
