"""The process of a `worker`, seen from outside: started, asked, waited for, and ended.

Boundary: knows nothing of Specs, and touches no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ops.testing.worker import Assignment, Channel, Message, serve

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from torch_ops.testing.worker import serve; serve(sys.argv[1:])"
)
_STARTUP = 120.0  # PyTorch comes from a cold disk, perhaps
_BURIAL = 10.0


@dataclass(frozen=True)
class Patience:
    """How long an isolated kernel is waited for, and how often its process is started anew.

    Attributes:
        first: Seconds for loading a kernel, and for its first call of a kind: those may compile.
        later: Seconds for everything else.
        deaths: Dead processes a cell; then the smallest example seen is reported.
        hanging: Seconds a cell that are spent on examples that hang; then likewise.
    """

    first: float = 120.0
    later: float = 30.0
    deaths: int = 40
    hanging: float = 180.0

    def __post_init__(self) -> None:
        if min(self.first, self.later, self.deaths, self.hanging) <= 0:
            msg = f"Patience: received {self}, accepted positive numbers"
            raise ValueError(msg)


class DeathError(Exception):
    """The process is gone.

    Attributes:
        detail: How it went.
        waited: Seconds after which it was killed, as it didn't answer; 0 where it died by itself.
    """

    def __init__(self, detail: str, *, waited: float = 0.0) -> None:
        super().__init__(detail)
        self.detail, self.waited = detail, waited


class IsolationError(RuntimeError):
    """Something else than the kernel failed in its process; the text has the traceback."""


class _Fork:
    """A worker that is a fork of this process, with the form of a `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], others: Sequence[int]) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            for descriptor in others:
                os.close(descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(2, 1)
            serve(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def wait(self) -> int:
        """Waits for the end and gives the exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Process:
    """The process, started when it is first asked and again whenever it has died.

    Attributes:
        forks: Whether workers are forks of this process, begun at once, which spares them seconds
            of importing: for a process that has no threads and has touched no GPU.
    """

    forks = False

    def __init__(self, assigned: Assignment, patience: Patience) -> None:
        self.assigned, self.patience = assigned, patience
        self.device = ""
        self._process: subprocess.Popen[bytes] | _Fork | None = None
        self._pid = 0
        self._greeted = False
        self._number = 0
        self._kept = b""
        self._kinds: set[str] = set()
        self._unloadable: DeathError | None = None
        if self.forks:
            self._start()

    def ask(self, request: Message) -> Message:
        """Sends one request and returns the answer.

        Raises:
            DeathError: The process died, or didn't answer in time and was killed.
            ValueError: The kernel isn't there.
            IsolationError: Something else failed.
        """
        if not self._greeted:
            self._greet()
        return self._ask(request, self.patience.later)

    def _greet(self) -> None:
        """Has the kernel loaded; one that kills or hangs the process then is tried only once."""
        if self._unloadable is not None:
            raise self._unloadable
        try:
            self.device = self._ask({"do": "hello"}, self.patience.first)["device"]
        except DeathError as death:
            detail = f"{death.detail}, while the kernel was loaded"
            self._unloadable = DeathError(detail, waited=death.waited)
            raise self._unloadable from None
        self._greeted = True

    def close(self) -> None:
        """Ends the process and all that it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._channel.incoming)
        os.close(self._channel.outgoing)
        self._process, self._pid, self._greeted, self._kept = None, 0, False, b""

    def _start(self) -> None:
        if self._process is not None:
            return
        requests, to_worker = os.pipe()
        from_worker, answers = os.pipe()
        self._channel = Channel(from_worker, to_worker)
        assigned = json.dumps(dataclasses.asdict(self.assigned))
        given = [str(os.getpid()), str(requests), str(answers), assigned]
        if self.forks:
            self._process = _Fork(given, (to_worker, from_worker))
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps([str(p) for p in sys.path]), *given],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what kernels print is no part of a report
                pass_fds=(requests, answers),
                start_new_session=True,
            )
        os.close(requests)
        os.close(answers)
        try:
            started = self._message(time.monotonic() + _STARTUP) is not None
        except DeathError:
            msg = "the process for the kernel ended while it started: its stderr says why"
            raise IsolationError(msg) from None
        if not started:
            self.close()
            raise IsolationError(f"the process for the kernel didn't start in {_STARTUP:g} s")

    def _ask(self, request: Message, seconds: float) -> Message:
        self._start()
        self._number += 1
        with contextlib.suppress(BrokenPipeError):  # the end of the answers says that, too
            self._channel.say({"id": self._number, **request})
        deadline = time.monotonic() + seconds
        while (message := self._message(deadline)) is not None:
            if "died" in message:
                raise DeathError(f"the process died: {_end(message['died'])}")
            if message.get("id") != self._number:
                continue  # of a request that was given up
            if "kind" not in message:
                return self._checked(message)
            new = message["kind"] not in self._kinds
            self._kinds.add(message["kind"])
            seconds = self.patience.first if new else self.patience.later
            deadline = time.monotonic() + seconds
        self._bury()
        raise DeathError(f"no answer within {seconds:g} s", waited=seconds)

    def _checked(self, message: Message) -> Message:
        if "unknown" in message:
            msg = (
                f"verify: backend: {message['error']} "
                "(accepted with isolate: a backend of an installed package, or a function of an "
                "importable module; isolate=False takes what is in this process)"
            )
            raise ValueError(msg)
        if "error" in message:
            raise IsolationError(f"the kernel's process failed:\n{message['error']}")
        if "lost" in message and not self._gone():
            self._bury()
        return message

    def _gone(self) -> bool:
        """Waits for the word that the process ended."""
        deadline = time.monotonic() + _BURIAL
        while (message := self._message(deadline)) is not None:
            if "died" in message:
                return True
        return False

    def _bury(self) -> None:
        """Kills what doesn't answer; its parent, too, where a driver keeps it from ending."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        if not self._pid or not self._gone():
            self.close()

    def _message(self, deadline: float) -> Message | None:
        """The next message, None at the deadline."""
        while b"\n" not in self._kept:
            left = max(deadline - time.monotonic(), 0.0)
            if not select.select([self._channel.incoming], [], [], left)[0]:
                return None
            chunk = os.read(self._channel.incoming, 1 << 16)
            if not chunk:
                self.close()
                raise DeathError("the process died: it closed its pipe")
            self._kept += chunk
        line, _, self._kept = self._kept.partition(b"\n")
        try:
            message: Message = dict(json.loads(line))
        except (ValueError, TypeError):
            self.close()
            detail = f"the process wrote {line[:40]!r} into a file that isn't its own"
            raise DeathError(detail) from None
        if "pid" in message:
            self._pid = message["pid"]
        if "died" in message:
            self._pid, self._greeted = 0, False
        return message


def _end(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"  # a real-time one has no name
