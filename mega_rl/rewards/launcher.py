"""Gives up everything that an untrusted program must not have, then becomes that program.

A script that `sandbox.run_program` starts with a bare interpreter (``python -I -S launcher.py NUMBERS... PAIRS...``);
it imports the standard library only, and other modules import it only for its names.

With namespaces there are two processes: the outer one waits; the inner one is the first process of the program's own
process namespace, so that when it ends, or when the outer one is killed, the kernel kills every other process in there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 1, 24, 38, 47, 4
CAPABILITY_VERSION_3 = 0x20080522
MAX_CAPABILITIES = 64  # the kernel refuses the numbers that it does not know
NOBODY = 65534  # the kernel's own number for a user or group that is none
FAILED_EXIT = 86  # of the launcher, which then has written why to the report

NUM_NUMBERS = 9  # arguments before the pairs of paths
WORKING_DIRECTORY = "/tmp"  # of the program, with namespaces
OLD_ROOT = "/old"
DEVICES = ("null", "zero", "full", "random", "urandom")
HOSTNAME = b"sandbox"

libc = ctypes.CDLL(None, use_errno=True)


class StepError(Exception):
    """A step that this system does not allow: the step's name, and the kernel's reason."""


def main(arguments: list[str]) -> None:
    """Become the program.

    Args:
        arguments: CPU seconds; bytes of address space, of a file and of temporary files; open files; processes; 1 for
            namespaces; descriptors of the program's text and of the report of what failed; then, with namespaces, what
            the program sees of the system: source and place of each file or directory.
    """
    numbers = list(map(int, arguments[:NUM_NUMBERS]))
    cpu_s, memory_bytes, file_bytes, temporary_bytes, num_files, num_processes, namespaces, text, report = numbers
    pairs = arguments[NUM_NUMBERS:]
    os.set_inheritable(report, False)
    os.umask(0o022)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    outer = None
    try:
        check("prctl no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))  # set-user-id programs do not help
        if namespaces:
            outer = enter_namespaces()
            see_only(list(zip(pairs[::2], pairs[1::2], strict=True)), temporary_bytes)
        write_program(text)
        drop_privileges()
        if outer is not None and has_ended(outer):
            os._exit(FAILED_EXIT)
        limits = (
            (resource.RLIMIT_CPU, cpu_s),
            (resource.RLIMIT_AS, memory_bytes),
            (resource.RLIMIT_FSIZE, file_bytes),
            (resource.RLIMIT_NOFILE, num_files),
            (resource.RLIMIT_NPROC, num_processes),
            (resource.RLIMIT_CORE, 0),
        )
        for limit, value in limits:
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-I", "-B", "program.py"])
    except (StepError, OSError) as error:
        os.write(report, str(error).encode(errors="replace")[:1000])
        os._exit(FAILED_EXIT)


def check(step: str, result: int) -> None:
    """Raises StepError if a call of the C library failed."""
    if result != 0:
        raise StepError(f"{step}: {os.strerror(ctypes.get_errno())}")


def enter_namespaces() -> int:
    """Go on as the first process of a new process namespace, with all capabilities in namespaces of its own only.

    The identities of the new user namespace are written by a process that stays outside of it: only that one may give
    the program another identity than the trainer's.

    Returns:
        A descriptor that tells whether the outer process still waits, see `has_ended`.
    """
    user, group = os.geteuid(), os.getegid()
    ready_read, ready_write = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(ready_write)
        os._exit(0 if os.read(ready_read, 1) and map_identities(os.getppid(), user, group) else 1)
    check("unshare", libc.unshare(NAMESPACES))
    os.write(ready_write, b"1")
    os.close(ready_read)
    os.close(ready_write)
    if os.waitpid(writer, 0)[1] != 0:
        raise StepError("uid_map: this user's number cannot be mapped")
    alive_read, alive_write = os.pipe()
    inner = os.fork()
    if inner:
        os.close(alive_read)
        status = os.waitpid(inner, 0)[1]
        os._exit(os.waitstatus_to_exitcode(status) & 255)
    os.close(alive_write)
    os.setsid()  # out of the outer process's group, which the program could otherwise signal
    return alive_read


def has_ended(outer: int) -> bool:
    """Whether the outer process ended before this one asked for the signal that tells of it."""
    os.set_blocking(outer, False)
    try:
        return not os.read(outer, 1)
    except BlockingIOError:
        return False


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


def see_only(pairs: list[tuple[str, str]], temporary_bytes: int) -> None:
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
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user unsets it


if __name__ == "__main__":
    main(sys.argv[1:])
