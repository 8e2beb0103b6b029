"""FlashAttention-4 without a GPU: every kind of call compiles for Hopper, the cache is read again, and one archive."""

import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import flash4 as command
from tests.support.pages import REPOSITORY
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.attention.kernels import KERNELS, Case, choose_for_case, flash4
from torchtitan_cp.attention.tiles import CAUSAL

MISSING = command.missing("compile")
# For each row of flash4's rates on Hopper, its head dims, equal and other than those of values; groups and none.
DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
HEADS = [(16, 4), (16, 16)]


# Compiles one kind of call, and prints every file of Python's modules and every shared library of the process.
LOADED = """
import sys
from pathlib import Path
import torch
from benchmarks import flash4
from torchtitan_cp.attention.tiles import CAUSAL
flash4.set_target("sm_90", Path(sys.argv[1]))
flash4.compile_call((64, 64), (4, 4), CAUSAL, torch.bfloat16, sequences=2)
modules = [module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
print(*modules, *Path("/proc/self/maps").read_text().split(), sep="\\n")
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def output(*arguments: str) -> list[str]:
    """The lines that a process of Python prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    call = [sys.executable, *arguments]
    done = subprocess.run(call, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def compile_for_hopper(cache: Path, *arguments: str) -> list[str]:
    """The lines of a process that compiles, of which each is one kind of call."""
    return output("-m", "benchmarks.flash4", "compile", str(cache), *arguments)


@pytest.mark.deep
@pytest.mark.skipif(bool(MISSING), reason=f"flash4: not installed: {MISSING}")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dims", DIMS)
def test_every_call_that_auto_can_choose_compiles_for_hopper_without_a_gpu(
    cache: Path, dims: tuple[int, int], heads: tuple[int, int]
) -> None:
    before = set(cache.rglob("*.o"))
    lines = compile_for_hopper(cache, "--dims", *map(str, dims), "--heads", *map(str, heads))
    assert len(lines) == len(command.LAYOUTS) * len(command.BANDS)
    kinds = [path.parent.name for path in set(cache.rglob("*.o")) - before]
    assert kinds.count("fwd") == kinds.count("bwd") == len(lines)


@pytest.mark.deep
@pytest.mark.skipif(bool(MISSING), reason=f"flash4: not installed: {MISSING}")
def test_what_was_compiled_is_read_from_the_cache_by_another_process(tmp_path: Path) -> None:
    arguments = ("--dims", "64", "64", "--heads", "4", "4", "--layouts", "packed", "--softcap", "30.0")
    compile_for_hopper(tmp_path, *arguments)
    compiled = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")}
    compile_for_hopper(tmp_path, *arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")} == compiled


@pytest.mark.deep
@pytest.mark.skipif(bool(MISSING), reason=f"flash4: not installed: {MISSING}")
def test_no_file_that_compiling_loads_is_left_out_of_the_archive(tmp_path: Path) -> None:
    loaded = set(output("-c", LOADED, str(tmp_path)))
    content = {str(file): str(file.locate()) for name in command.PACKAGES for file in files(name) or ()}
    needed = [file for file, path in content.items() if path in loaded]
    packages = {"flash_attn", "nvidia_cutlass_dsl", "quack", "tvm_ffi", "einops"}
    assert {file.partition("/")[0] for file in needed} == packages
    assert not [file for file in needed if command.excluded(file)]
    assert not [path for path in loaded if "torch_c_dlpack_ext" in path]
    for pattern in command.EXCLUDED:
        assert any(fnmatch(file, pattern) for file in content), pattern


def test_the_windows_that_are_compiled_are_those_of_any_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package tells calls apart by which sides are bounded, and causal ones from other windows."""

    def kind_of(window: tuple[int | None, int | None]) -> tuple[bool, bool, bool]:
        return window[0] is None, window[1] is None, window == (None, 0)

    compiled = {kind_of(flash4.kind(command.TOKENS, command.TOKENS, band)) for band in command.BANDS.values()}
    assert len(compiled) == len(command.BANDS)
    met = set()
    windows = ((90, -1), (11, -1), (-1, -1))
    masks = [*(AttentionMask(window=window) for window in windows), AttentionMask(causal=False, window=(90, 60))]
    for mask in masks:
        for rank in range(4):
            for step in make_plan(256, mask=mask, ranks=4, rank=rank, layout="zigzag").steps:
                tiles = KERNELS["flash4"].plain_tiles(step.tiles)
                met |= {kind_of(flash4.kind(t.q_stop - t.q_start, t.k_stop - t.k_start, t.band)) for t in tiles}
    assert met == compiled
    monkeypatch.setattr(flash4, "_installed_version", lambda: flash4.VERSION)
    choose_for_case.cache_clear()
    for qk_dim, v_dim in DIMS:
        case = Case("cuda", torch.bfloat16, qk_dim, v_dim, dense=False, capability=(9, 0))
        assert choose_for_case("auto", case) == "flash4"
    choose_for_case.cache_clear()


def test_a_call_of_fake_tensors_reaches_the_package_with_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = []

    def forward(q: Any, k: Any, v: Any, shape: Any, scores: Any) -> tuple[Any, Any]:
        windows.append((q.device.type, q.shape, shape))
        return q, q

    monkeypatch.setattr(flash4, "forward", forward)
    monkeypatch.setattr(flash4, "backward", lambda dout, q, k, v, out, lse, shape, scores: None)
    for sequences in (300, 0):
        command.compile_call((64, 32), (4, 2), CAUSAL, torch.bfloat16, sequences)
    (device, packed_shape, packed_tiles), (_, shape, band) = windows
    assert (device, packed_shape, packed_tiles.kind) == ("cuda", (command.TOKENS, 4, 64), (None, 0))
    assert packed_tiles.cu_seqlens_q.shape == (301,)
    assert (shape, band) == ((1, command.TOKENS, 4, 64), CAUSAL)


def test_one_archive_has_the_packages_of_this_environment_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def download(call: list[str], check: bool) -> None:
        folder = Path(next(option for option in call if option.startswith("--dest=")).removeprefix("--dest="))
        folder.mkdir()
        for wanted in call[-len(command.PACKAGES) :]:
            asked.append(wanted)
            name = wanted.partition("==")[0]
            with zipfile.ZipFile(folder / f"{name}.whl", "w") as wheel:
                for file in (f"{name}/__init__.py", "tvm_ffi/include/tvm/ffi/any.h"):
                    wheel.writestr(file, "machine code" * 100)
        assert "--python-version=3.12" in call

    monkeypatch.setattr(command.subprocess, "run", download)
    monkeypatch.setattr(command, "version", lambda name: "1.2")
    cache = tmp_path / "compiled"
    cache.mkdir()
    for name in ("kernel.o", "kernel.lock"):
        (cache / name).write_text("compiled")
    file = tmp_path / "flash4.tar.xz"
    command.main(["pack", str(file), "--python", "3.12", "--cache", str(cache)])
    assert asked == [f"{name}==1.2" for name in command.PACKAGES]
    with lzma.open(file) as packed, tarfile.open(fileobj=packed) as archive:
        names = archive.getnames()
    assert {f"./{name}/__init__.py" for name in command.PACKAGES} | {"cache/kernel.o"} <= set(names)
    assert "cache/kernel.lock" not in names
    assert not [name for name in names if name.endswith("any.h")]
    assert f"{file}: 0.0 MiB" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "module"), [(["compile"], "find_spec"), (["pack"], "version")])
def test_what_is_missing_is_said_with_how_to_install_it(
    words: list[str], module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(command, module, (lambda name: None) if module == "find_spec" else lacks)
    with pytest.raises(SystemExit):
        command.main([*words, str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert "is not installed\n  fix: pip install 'torchtitan-cp[flash4]'" in said
    assert not list(tmp_path.iterdir())
