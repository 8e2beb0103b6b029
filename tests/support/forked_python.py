"""A program in place of `python` whose runs are forks of a process that has imported torch.

A new Python takes two to six seconds of a core for its imports, and a test of a page may start five. What only a new
one shows is left to others: run_train.sh on the quickstart, a stopped job, the commands' own tests.
"""

import atexit
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, process, resource_tracker, spawn
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.support.rank_pool import FORK

# Sends all that it was started with to the server: words, folder, environment, open files. Then it passes signals on
# and ends as the fork does. A fork cannot load a library before all others; for that the client becomes a new Python.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
if "LD_PRELOAD" in os.environ or not [word for word in words if word != "-u" and word != "-B"]:
    os.execv({python!r}, [{python!r}, *words])
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [file for file in files if file < 3 or os.path.exists(f"/proc/self/fd/{{file}}") and os.get_inheritable(file)]
blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
start = [__file__, words, os.getcwd(), dict(os.environ), files, blocked]
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"."], files)
order = json.dumps(start).encode()
server.sendall(len(order).to_bytes(8, "big") + order)
pid = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_SETMASK, [])
code = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big", signed=True)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
NEW_PYTHON = '#!/bin/sh\nexec "{python}" "$@"\n'
HIGH = 500  # no file of a run has such a number


@contextmanager
def forked_python(folder: Path) -> Iterator[Path]:
    """Put the program into this folder, for use within the context; only on Linux does it fork. Yields its path."""
    path = folder / "python"
    path.touch(mode=0o755)
    if sys.platform != "linux":
        path.write_text(NEW_PYTHON.format(python=sys.executable))
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="python-") as place:  # a socket's address has at most a hundred characters
        address = f"{place}/socket"
        path.write_text(CLIENT.format(python=sys.executable, address=address))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            server = FORK.Process(target=_serve, args=(listener,))
            server.start()
        try:
            yield path
        finally:
            server.terminate()
            server.join()


def _serve(listener: socket.socket) -> None:
    """Fork for each client; tell it the exit code, or kill its fork when it is gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    running: dict[int, int] = {}  # of a client's connection, its fork
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in selector.select():
                    if key.fileobj is listener:
                        _accept(listener.accept()[0], selector, running)
                    elif isinstance(key.fileobj, int):  # a fork has ended
                        _tell(key.fileobj, key.data, selector, running)
                    elif key.data in running:  # its client is gone
                        selector.unregister(key.fileobj)
                        os.kill(running[key.data], signal.SIGKILL)
        finally:
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)


def _accept(client: socket.socket, selector: selectors.BaseSelector, running: dict[int, int]) -> None:
    _, files, _, _ = socket.recv_fds(client, 1, 250)
    order = client.recv(int.from_bytes(client.recv(8, socket.MSG_WAITALL), "big"), socket.MSG_WAITALL)
    pid = os.fork()
    if not pid:
        _become(files, *json.loads(order))
    for file in files:
        os.close(file)
    client.sendall(pid.to_bytes(8, "big"))
    running[client.fileno()] = pid
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, client)
    selector.register(client, selectors.EVENT_READ, client.fileno())


def _tell(fork: int, client: socket.socket, selector: selectors.BaseSelector, running: dict[int, int]) -> None:
    _, status = os.waitpid(running.pop(client.fileno()), 0)
    selector.unregister(fork)
    os.close(fork)
    if client in selector.get_map():
        selector.unregister(client)
        client.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
    client.close()


def _become(
    files: list[int], program: str, words: list[str], folder: str, environment: dict[str, str], numbers: list[int],
    blocked: list[int],
) -> NoReturn:  # fmt: skip
    """Run what the client was asked to run, and leave."""
    code = 1
    try:
        _take_files(files, numbers)
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        _forget_parent(program)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        code = _run(program, words)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _take_files(files: list[int], numbers: list[int]) -> None:
    """Have the client's files under the client's numbers, and no other."""
    moved = [os.dup2(file, HIGH + index) for index, file in enumerate(files)]
    os.closerange(3, HIGH)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if number else "r"
        stream = os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _forget_parent(program: str) -> None:
    """What a module learned of the process that imported it, and a new Python would find otherwise."""
    process._parent_process = None  # type: ignore[attr-defined]
    process._children = set()  # type: ignore[attr-defined]
    for known in (resource_tracker._resource_tracker, forkserver._forkserver):
        known.__init__()  # in place, as its methods are functions of its module
    sys.executable = program
    spawn.set_executable(program)
    random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def _run(program: str, words: list[str]) -> int:
    """The program of a Python's command line. Returns its exit code."""
    sys.orig_argv = [program, *words]
    while words[0] in ("-u", "-B"):
        words = words[1:]
    kind, *rest = words
    first = os.getcwd() if kind == "-m" else "" if kind == "-c" else str(Path(kind).resolve().parent)
    added = os.environ.get("PYTHONPATH", "").split(":")
    sys.path[:] = [first, *filter(None, added), *(path for path in sys.path if path not in ("", first, *added))]
    try:
        if kind == "-m":
            sys.argv = rest
            sys.modules.pop(rest[0], None)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(rest[0], names)
        else:
            sys.argv = words
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
