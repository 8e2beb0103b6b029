"""FlashAttention-4 where no GPU is: compiles what kernel `flash4` calls, and packs its package for another machine.

    python -m benchmarks.flash4 compile FOLDER --dims 128 128 --heads 32 8
    python -m benchmarks.flash4 pack flash4.tar.xz --python 3.12 --cache FOLDER

`compile` fills a cache that a job on the GPU reads instead of compiling; it fits one version of the package, one minor
version of Python and one generation of GPUs. `docs/cuda.md` says how to use both.
"""

import argparse
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan_cp.attention.kernels import ScoreMod, flash4
from torchtitan_cp.attention.kernels.packed import Packed
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.tiles import CAUSAL, FULL

# Per architecture of the package: the compiler's target, and the multiprocessors of an H100 or H200, and of a B200.
TARGETS = {"sm_90": ("sm_90a", 132), "sm_100": ("sm_100a", 148)}
TOKENS = 4096  # of a tile: more than a block, of which a single one is another kind of call
# Which sides of the window are bounded, as tiles of causal and windowed masks have it.
BANDS = {
    "full": FULL,
    "causal": CAUSAL,
    "window on both sides": Band(-1023, 0),
    "window on the left": Band(-1023, None),
    "window on the right": Band(None, 64),
}
# Packed sequences of a call, 0 for one that is not packed. The package looks more than 256 up by another kernel.
LAYOUTS = {"packed": 2, "many": 300, "dense": 0}
# Of flash-attn-4 and of what it needs beside torch for CUDA 13 and this project. torch-c-dlpack-ext is required by it
# too, and does nothing with torch 2.10 and later, which has that function.
PACKAGES = (
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-cu13",
    "quack-kernels",
    "apache-tvm-ffi",
    "einops",
)
# Files that nothing reads when the kernel compiles or runs: the compiler's tracer with its libraries, and C++ sources.
# No file of flash_attn can be one, as a hash of all of them names its cache; nor tvm_ffi's library for tests, to which
# its core is linked.
EXCLUDED = (
    "nvidia_cutlass_dsl/dsl_packages/iket/*",
    "tvm_ffi/3rdparty/*",
    "tvm_ffi/cython/*",
    "tvm_ffi/include/*",
    "tvm_ffi/src/*",
)
# It is mostly machine code, and the two largest libraries, 226 MiB together, share much of it: the window spans both.
FILTERS = ({"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 2**28, "lc": 4, "pb": 0})
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")


def excluded(file: str) -> bool:
    """Whether the archive leaves out this file of a package, whose path is relative to the packages' folder."""
    return any(fnmatch(file, pattern) for pattern in EXCLUDED)


def missing(command: str) -> str:
    """The first thing that a command needs and this environment lacks, or ""."""
    if command == "compile":
        modules = ("flash_attn", "cutlass", "quack", "tvm_ffi", "triton")
        return next((f"the module {name}" for name in modules if find_spec(name) is None), "")
    try:
        for name in PACKAGES:
            version(name)
    except PackageNotFoundError:
        return name
    return ""


def set_target(arch: str, folder: Path) -> None:
    """Make the package compile for a GPU that is not there, and keep what it compiles; before its first import."""
    target, multiprocessors = TARGETS[arch]
    os.environ["FLASH_ATTENTION_ARCH"], os.environ["CUTE_DSL_ARCH"] = arch, target
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(multiprocessors)
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(folder.resolve())


def compile_call(
    dims: tuple[int, int], heads: tuple[int, int], band: Band, dtype: torch.dtype, sequences: int, softcap: float = 0.0
) -> tuple[float, float]:
    """Compile one kind of call, forward and backward, on tensors that hold nothing.

    Args:
        dims: Dqk and Dv; heads: Hq and Hkv; sequences: of a packed call, or 0.

    Returns:
        the seconds that each took, about 0 if the cache has it.
    """
    scores = ScoreMod(0.1, softcap)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):

        def rows(count: int, dim: int) -> Tensor:
            return torch.empty(*((TOKENS,) if sequences else (1, TOKENS)), count, dim, dtype=dtype)

        q, dout = (rows(heads[0], dim) for dim in dims)
        k, v = (rows(heads[1], dim) for dim in dims)
        edges = torch.empty(sequences + 1, dtype=torch.int32)
        window = flash4.kind(TOKENS, TOKENS, band)
        shape = Packed(window, edges, edges, TOKENS, TOKENS) if sequences else band
        started = time.perf_counter()
        out, lse = flash4.forward(q, k, v, shape, scores)
        between = time.perf_counter()
        flash4.backward(dout, q, k, v, out, lse, shape, scores)
        return between - started, time.perf_counter() - between


def compile_all(
    dims: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype, layouts: Sequence[str], softcap: float
) -> None:
    """Compile every kind of call of a model's attention but those of tiles of one block, and print the seconds."""
    for (name, band), layout in product(BANDS.items(), layouts):
        forward, backward = compile_call(dims, heads, band, dtype, LAYOUTS[layout], softcap)
        print(f"{dims} {heads} {layout}, {name}: {forward:.1f} s forward, {backward:.1f} s backward", flush=True)


def pack(file: Path, python: str, cache: Path | None) -> None:
    """Write one archive of the package and of what it needs, in the versions installed here, for a Python of Linux.

    Args:
        python: its minor version, such as "3.12"; cache: a folder that `compile` filled.
    """
    names = [f"{name}=={version(name)}" for name in PACKAGES]
    target = [f"--platform={platform}" for platform in PLATFORMS]
    with tempfile.TemporaryDirectory() as name:
        wheels, content = Path(name, "wheels"), Path(name, "content")
        arguments = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", *target, f"--dest={wheels}"]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *arguments, *names], check=True)
        for path in wheels.glob("*.whl"):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(content, [member for member in wheel.namelist() if not excluded(member)])
        with lzma.open(file, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(content, ".")
            if cache:
                archive.add(cache, "cache", filter=lambda member: None if member.name.endswith(".lock") else member)
    print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flash4", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("compile", help="fill a cache for a GPU that is not there")
    one.add_argument("folder", type=Path)
    one.add_argument("--arch", choices=TARGETS, default="sm_90")
    one.add_argument("--dims", type=int, nargs=2, default=[128, 128], metavar=("DQK", "DV"))
    one.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("HQ", "HKV"))
    one.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    one.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    one.add_argument("--softcap", type=float, default=0.0)
    other = commands.add_parser("pack", help="write one archive for a machine without network")
    other.add_argument("file", type=Path)
    other.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    other.add_argument("--cache", type=Path)
    options = parser.parse_args(arguments)
    if lacks := missing(options.command):
        parser.error(f"{lacks} is not installed\n  fix: {flash4.INSTALL}")
    if options.command == "pack":
        pack(options.file, options.python, options.cache)
        return
    set_target(options.arch, options.folder)
    warnings.filterwarnings("ignore", message="Argument aux_data")  # it is a named tuple of None
    dims, heads = tuple(options.dims), tuple(options.heads)
    compile_all(dims, heads, getattr(torch, options.dtype), options.layouts, options.softcap)


if __name__ == "__main__":
    main()
