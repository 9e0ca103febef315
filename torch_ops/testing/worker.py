"""The process that runs examples for `isolation`: it may crash, hang, or lose its GPU.

There are two. One imports what every example needs and forks the other, which runs them; when that
one dies, the first reports how and forks the next, in milliseconds instead of the seconds that
importing takes. Boundary: the first touches no GPU, since a process forked after that can't use it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

import torch_ops
from torch_ops.declarations import catalogue
from torch_ops.registry import registry
from torch_ops.testing.classes import ClassLimit, compiled_for
from torch_ops.testing.compare import DeviceLostError, ViolationError
from torch_ops.testing.examine import Examiner, Tally
from torch_ops.testing.proof import proof_of
from torch_ops.testing.registered import registered
from torch_ops.testing.spec import Spec
from torch_ops.testing.subject import Subject, subject_of

Message = dict[str, Any]
_PR_SET_PDEATHSIG = 1
_SYNTAX = "module:name"


@dataclass(frozen=True)
class Assignment:
    """What is examined, as plain data.

    Attributes:
        op: The op.
        backend: A registered backend, or nothing.
        target: The kernel of the backend, or the function itself, as ``module:name``.
        device: Where it runs.
        threads: How many threads PyTorch uses.
    """

    op: str
    backend: str
    target: str
    device: str
    threads: int

    def subject(self) -> Subject:
        """Finds the subject in this process.

        Raises:
            LookupError: It isn't here.
        """
        if not self.backend:
            return subject_of(found(self.target))
        try:
            here = registry.find(self.op, self.backend).target
        except torch_ops.UnknownBackendError:
            here = ""
        if here != self.target:
            msg = f"backend {self.backend!r} of op {self.op!r} is registered in one process alone"
            raise LookupError(msg)
        return registered(self.op, self.backend, torch.device(self.device))


def found(target: str) -> Callable[..., Any]:
    """Imports a function by ``module:name``, where the name may have dots.

    Raises:
        LookupError: There is no such function.
    """
    module, _, path = target.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise LookupError(f"{target!r} can't be imported: {error}") from error
    return value  # type: ignore[no-any-return]


class Channel:
    """Lines of JSON over two pipes."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing

    def say(self, message: Message) -> None:
        """Sends one message."""
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self.outgoing, line) :]

    def heard(self) -> Iterator[Message]:
        """Yields messages until the other side closes."""
        kept = b""
        while chunk := os.read(self.incoming, 1 << 16):
            *lines, kept = (kept + chunk).split(b"\n")
            yield from map(json.loads, lines)


class _Desk:
    """Answers requests, one by one."""

    def __init__(self, assignment: Assignment, channel: Channel) -> None:
        self.assignment, self.channel = assignment, channel
        self.proof = proof_of(assignment.op)
        self.device = torch.device(assignment.device)
        self.kinds: set[str] = set()
        self.request: Message = {}

    def __call__(self, request: Message) -> Message:
        self.request = request
        try:
            return self._hello() if request["do"] == "hello" else self._example(request)
        except LookupError as error:
            return {"error": str(error), "unknown": True}
        except Exception:
            return {"error": traceback.format_exc()}

    def _hello(self) -> Message:
        """Does what takes long in a new process: loads the kernel, starts the device."""
        self.subject = self._watched(self.assignment.subject())
        self.contract = self.subject.under(catalogue()[self.assignment.op].contract)
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else ""
        try:
            importlib.import_module(self.assignment.target.partition(":")[0])
        except Exception as error:
            return {"device": name, "unloaded": str(error)}  # the first call raises it, too
        return {"device": name}

    def _watched(self, subject: Subject) -> Subject:
        """Says so before a call for which a kernel may have to be compiled."""

        def call(*args: Any) -> Any:
            kind = compiled_for(dict(enumerate(args)))
            if kind not in self.kinds:
                self.kinds.add(kind)
                self.channel.say({"id": self.request["id"], "kind": kind})
            return subject.call(*args)

        call.__wrapped__ = subject.call  # type: ignore[attr-defined]
        return replace(subject, call=call)

    def _example(self, request: Message) -> Message:
        spec, most = Spec.from_json(request["spec"]), request["most"]
        limit = None if most is None else ClassLimit(most, request["admitted"])
        examine = Examiner(self.subject, self.proof, self.contract, self.device, limit=limit)
        tally = Tally()
        reply: Message = {}
        try:
            if request["do"] == "example":
                reply["ratio"] = examine(spec, tally, with_laws=request["laws"])
            else:
                reply["ran"] = examine.operator(spec, request["do"])
        except ViolationError as broken:
            reply["violation"] = [broken.layer, broken.detail]
        except DeviceLostError as lost:
            reply["lost"] = lost.detail
        admitted = [] if limit is None else sorted(limit.seen)
        return {**reply, "tally": tally.to_dict(), "admitted": admitted}


def _end_with_parent(parent: int) -> None:
    """Has the system kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _live(assignment: Assignment, channel: Channel) -> None:
    torch.set_num_threads(assignment.threads)
    channel.say({"pid": os.getpid()})
    desk = _Desk(assignment, channel)
    for request in channel.heard():
        reply = desk(request)
        channel.say({"id": request["id"], **reply})
        if "lost" in reply:
            return


def serve(arguments: Sequence[str]) -> NoReturn:
    """Forks a process that answers, and another whenever one dies, until killed.

    Args:
        arguments: The process to end with, two file descriptors, an `Assignment` as JSON.
    """
    parent, incoming, outgoing = map(int, arguments[:3])
    assignment = Assignment(**json.loads(arguments[3]))
    _end_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of a GPU's process has many GB
    proof_of(assignment.op)
    if assignment.backend and torch.device(assignment.device).type == "cpu":
        importlib.import_module("torch.testing._internal.optests")  # for opcheck: 3 s, and Inductor
    channel, here = Channel(incoming, outgoing), os.getpid()
    while True:
        child = os.fork()
        if not child:
            code = 1
            try:
                _end_with_parent(here)
                _live(assignment, channel)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        channel.say({"died": os.waitstatus_to_exitcode(status)})
