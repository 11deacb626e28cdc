"""The steps by which a process gives up everything that an untrusted program must not have.

A library of `mega_rl.rewards.sandbox.zygote`, which runs by itself with a bare interpreter: it imports the standard
library only, and other modules import it only for its names.

With namespaces there are two processes for a program: the outer one waits; the inner one is the first process of the
program's own process namespace, so that when it ends, or when the outer one is killed, the kernel kills every other
process in there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CAPABILITY_VERSION_3 = 0x20080522
MAX_CAPABILITIES = 64  # the kernel refuses the numbers that it does not know
NOBODY = 65534  # the kernel's own number for a user or group that is none
MAX_KILL_ROUNDS, KILL_WAIT_S = 1000, 0.05

WORKING_DIRECTORY = "/tmp"  # of the program, with namespaces
OLD_ROOT = "/old"
DEVICES = ("null", "zero", "full", "random", "urandom")
HOSTNAME = b"sandbox"

libc = ctypes.CDLL(None, use_errno=True)


class StepError(Exception):
    """A step that this system does not allow: the step's name, and the kernel's reason."""


def limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int, num_files: int, num_processes: int) -> None:
    """The limits of this process and of those that it starts, at most what it has already."""
    _limit(
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, num_files),
        (resource.RLIMIT_NPROC, num_processes),
        (resource.RLIMIT_CORE, 0),
    )


def limit_memory_and_files(memory_bytes: int, file_bytes: int) -> None:
    """The same for code of the user's, whose libraries may take much address space."""
    _limit((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_FSIZE, file_bytes), (resource.RLIMIT_CORE, 0))


def _limit(*limits: tuple[int, int]) -> None:
    for limit, value in limits:
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def end_with_parent() -> None:
    """The kernel kills this process when its parent ends; a change of user unsets it."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def gain_nothing() -> None:
    """Set-user-id programs do not help this process or those that it starts. Raises StepError."""
    check("prctl no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def adopt_orphans() -> None:
    """Descendants whose parents end become children of this process."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(process: int) -> list[int]:
    """The child processes of a process, those that ended and were not waited for included."""
    try:
        found: list[int] = []
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
        return found
    except FileNotFoundError:  # a kernel that does not list children
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(int(name)) == process]


def _parent(process: int) -> int | None:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:  # it ended
        return None


def hide_memory() -> None:
    """Other processes of the same user may not look into this one; `drop_privileges` ends that."""
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def kill_children() -> None:
    """Kill all children of this process and, as it adopts orphans, whatever those started."""
    for _ in range(MAX_KILL_ROUNDS):  # more than one if they multiply
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for child in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        signal.sigtimedwait([signal.SIGCHLD], KILL_WAIT_S)  # they take their time on a busy machine


def check(step: str, result: int) -> None:
    """Raises StepError if a call of the C library failed."""
    if result != 0:
        raise StepError(f"{step}: {os.strerror(ctypes.get_errno())}")


def unshare(namespaces: int) -> None:
    """Go on in new namespaces, a user namespace among them, with all capabilities in there only.

    The identities of the new user namespace are written by a process that stays outside of it: only that one may give
    the program another identity than the trainer's.

    Raises:
        StepError: this system does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    ready_read, ready_write = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(ready_write)
        os._exit(0 if os.read(ready_read, 1) and map_identities(os.getppid(), user, group) else 1)
    check("unshare", libc.unshare(namespaces))
    os.write(ready_write, b"1")
    os.close(ready_read)
    os.close(ready_write)
    if os.waitpid(writer, 0)[1] != 0:
        raise StepError("uid_map: this user's number cannot be mapped")


def own_interpreter() -> None:
    """Namespaces of mounts and users in which the interpreter's file is read-only.

    A process forked from an interpreter keeps a way to the interpreter's file, ``/proc/self/exe``, which leads past
    everything that is mounted later: through it the file's owner could change the file's mode.

    Raises:
        StepError: this system does not allow it.
    """
    unshare(CLONE_NEWUSER | CLONE_NEWNS)  # mounts of the system still come and go in there, none comes out
    interpreter = os.path.realpath(sys.executable)
    mount(interpreter, interpreter, None, MS_BIND)
    read_only(interpreter, MS_NODEV)


def map_identities(process: int, user: int, group: int) -> bool:
    """Map the trainer's user; root maps nobody too, for any other user the trainer's user is called nobody."""
    if user == 0:
        try:
            write(f"/proc/{process}/uid_map", f"0 0 1\n{NOBODY} {NOBODY} 1")
            write(f"/proc/{process}/gid_map", f"0 {group} 1\n{NOBODY} {NOBODY} 1")
            return True
        except OSError:  # a root whose own namespace has no nobody
            pass
    try:
        write(f"/proc/{process}/setgroups", "deny")
        write(f"/proc/{process}/uid_map", f"{NOBODY} {user} 1")
        write(f"/proc/{process}/gid_map", f"{NOBODY} {group} 1")
        return True
    except OSError:
        return False


def write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def see_only(pairs: Sequence[Sequence[str]], temporary_bytes: int) -> None:
    """A root directory that holds the pairs, read-only, a few devices, this namespace's processes and a small /tmp."""
    with contextlib.suppress(OSError):  # a container's settings are read-only
        # Of the new user namespace: the program makes none of its own, where kernels have had most of their holes.
        write("/proc/sys/user/max_user_namespaces", "0")
    check("sethostname", libc.sethostname(HOSTNAME, len(HOSTNAME)))
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp" + OLD_ROOT)
    os.chdir("/tmp")
    check("pivot_root", libc.pivot_root(b".", b"." + OLD_ROOT.encode()))
    os.chdir("/")
    bound: list[str] = []
    for source, place in sorted(pairs, key=lambda pair: len(pair[1])):
        if not any(place == other or place.startswith(other + "/") for other in bound):
            bind(OLD_ROOT + source, place)
            bound.append(place)
    devices = [f"/dev/{name}" for name in DEVICES if os.path.exists(f"{OLD_ROOT}/dev/{name}")]
    for device in devices:
        bind(OLD_ROOT + device, device)
    own_files()
    for place in mounts_below(bound):
        read_only(place, MS_NODEV)
    for device in devices:  # can be written to; their owner and mode cannot be changed
        read_only(device, MS_NOEXEC)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={temporary_bytes},nr_inodes=4096,mode=1777")
    mount_proc()
    check("umount", libc.umount2(OLD_ROOT.encode(), MNT_DETACH))
    os.rmdir(OLD_ROOT)
    read_only("/", MS_NODEV)
    os.chdir(WORKING_DIRECTORY)


def mount(source: str | None, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Raises StepError."""
    texts = [None if text is None else os.fsencode(text) for text in (source, place, kind, options)]
    check(f"mount {place}", libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def bind(source: str, place: str) -> None:
    """Shows a file or directory at another place, with whatever is mounted below it."""
    if os.path.isdir(source):
        os.makedirs(place)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    mount(source, place, None, MS_BIND | MS_REC)


def own_files() -> None:
    """What programs look up about their user and shared memory, without a word about the real ones."""
    os.makedirs("/etc", exist_ok=True)
    for name, line in (
        ("passwd", f"nobody:x:{NOBODY}:{NOBODY}::/tmp:/bin/false\n"),
        ("group", f"nogroup:x:{NOBODY}:\n"),
    ):
        with open(f"/etc/{name}", "x") as file:
            file.write(line)
    os.makedirs("/tmp", exist_ok=True)
    os.makedirs("/proc", exist_ok=True)
    os.symlink("/tmp", "/dev/shm")  # one size limit for both


def mounts_below(places: list[str]) -> list[str]:
    """The places themselves and what is mounted deeper, as the kernel lists it."""
    with open(f"{OLD_ROOT}/proc/self/mountinfo", "rb") as file:
        points = [os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in file]
    return [point for point in points if any(point == place or point.startswith(place + "/") for place in places)]


def read_only(place: str, flags: int) -> None:
    """Raises StepError. Flags that the mount has already are locked, so they are asked for again."""
    locked = os.statvfs(place).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(None, place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags | locked)


def mount_proc() -> None:
    """This namespace's processes, without the kernel's settings; nothing if a container masks parts of its own."""
    for options in ("subset=pid", None):  # the first needs Linux 5.8
        try:
            return mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
        except StepError:
            continue


def write_program(text: int) -> None:
    with open(text, "rb") as source, open("program.py", "xb") as program:
        program.write(source.read())
    os.chmod("program.py", 0o644)


def drop_privileges() -> None:
    """Nobody, without groups, if there is such a user here; and no capability, neither now nor by what it executes.

    Raises:
        StepError: capabilities are left.
    """
    for capability in range(MAX_CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused to those that have no capability anyway
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    check("capset", libc.capset(header, (ctypes.c_uint32 * 6)()))
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # a change of user unsets it too: the program may look at itself
    end_with_parent()
