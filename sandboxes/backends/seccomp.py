"""A system call filter for sandboxes: what namespaces do not hold.

Above: the bubblewrap backend. Below: seccomp(2) (classic BPF over `struct seccomp_data`), linux/audit.h for the names
of machines, and the kernel's system call tables for the numbers.

Refused are: the keyrings (a sandbox would inherit those of whoever started the host), sockets of families that no
network namespace holds (AF_VSOCK reaches a virtual machine's hypervisor) or that only widen what the kernel exposes,
calls that nothing in a sandbox needs and that kernel exploits have used, and what one process may do to another of its
uid without a signal when that other is PID 1: the agent runs under user code's uid there, and would be starved of
descriptors, memory or processor time.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from dataclasses import dataclass

# struct seccomp_data: int nr; __u32 arch; __u64 instruction_pointer; __u64 args[6] (low half first: little endian).
NUMBER, MACHINE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
ALLOW = 0x7FFF0000
ERRNO = 0x00050000
X32 = 0x40000000  # numbers from here on are the second table of x86-64

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)

# By name: (x86-64, aarch64).
REFUSED = {
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "mount_setattr": (442, 442),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "setns": (308, 268),
    "unshare": (272, 97),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
}

AGENT = 1
EVERYBODY = 2  # PRIO_USER: all processes of a uid; IOPRIO_WHO_USER is 3
IO_EVERYBODY = 3
# By name: (x86-64, aarch64), and the arguments that make it one about the agent: (where, value).
REFUSED_OF_AGENT = {
    "prlimit64": ((302, 261), ((FIRST_ARGUMENT, AGENT),)),
    "sched_setaffinity": ((203, 122), ((FIRST_ARGUMENT, AGENT),)),
    "sched_setscheduler": ((144, 119), ((FIRST_ARGUMENT, AGENT),)),
    "sched_setparam": ((142, 118), ((FIRST_ARGUMENT, AGENT),)),
    "sched_setattr": ((314, 274), ((FIRST_ARGUMENT, AGENT),)),
    "setpriority": ((141, 140), ((FIRST_ARGUMENT, EVERYBODY), (SECOND_ARGUMENT, AGENT))),
    "ioprio_set": ((251, 30), ((FIRST_ARGUMENT, IO_EVERYBODY), (SECOND_ARGUMENT, AGENT))),
}


@dataclass(frozen=True, slots=True)
class _Machine:
    audit: int
    column: int
    socket: int
    second_table: bool


MACHINES = {
    "x86_64": _Machine(0xC000003E, 0, 41, True),
    "aarch64": _Machine(0xC00000B7, 1, 198, False),
}


def program(machine: str = platform.machine()) -> bytes | None:
    """The filter as bubblewrap takes it (`struct sock_filter[]`), or None for a machine whose numbers are not known."""
    known = MACHINES.get(machine)
    if known is None:
        return None
    refuse, unsupported = ERRNO | errno.EPERM, ERRNO | errno.EAFNOSUPPORT
    lines = [
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 1, 0, known.audit),  # a program for another machine (32 bit) would have other numbers
        (RETURN, 0, 0, refuse),
        (LOAD, 0, 0, NUMBER),
    ]
    if known.second_table:
        lines += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, refuse)]
    for numbers in REFUSED.values():
        lines += [(EQUAL, 0, 1, numbers[known.column]), (RETURN, 0, 0, refuse)]
    for numbers, arguments in REFUSED_OF_AGENT.values():
        lines.append((EQUAL, 0, 3 * len(arguments) + 1, numbers[known.column]))
        for where, value in arguments:
            lines += [(LOAD, 0, 0, where), (EQUAL, 0, 1, value), (RETURN, 0, 0, refuse)]
        lines.append((RETURN, 0, 0, ALLOW))
    lines += [(EQUAL, 1, 0, known.socket), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, FIRST_ARGUMENT)]
    for family in FAMILIES:
        lines += [(EQUAL, 0, 1, int(family)), (RETURN, 0, 0, ALLOW)]
    lines.append((RETURN, 0, 0, unsupported))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
