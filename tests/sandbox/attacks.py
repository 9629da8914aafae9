"""Programs that try to get out, to stay, to see or to break something. Each prints ESCAPED where it succeeds.

`{secret}`, `{pid}`, `{port}`, `{socket}`, `{abstract}` and `{outside}` stand for things of the host's: a file and an
environment variable with a secret, a process of the same user, a listening port, Unix sockets, a folder. What calls
the kernel by number uses those of x86-64, and is left out elsewhere.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from panoply.sandbox import Limits

KERNEL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *given):
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(g) if isinstance(g, int) else g for g in given])
def tried(what, number, *given):
    found = call(number, *given)
    if found >= 0:
        print("ESCAPED", what, found)
"""
TRY = """
import sys
def attempt(what, function, *given):
    try:
        found = function(*given)
    except BaseException as problem:
        print(type(problem).__name__)
    else:
        print("ESCAPED", what, found)
"""


@dataclass(frozen=True)
class Attack:
    code: str
    kind: str
    ended: tuple[str, ...] = ("",)
    """How it may end in CPython."""
    says: str = ""
    """What CPython prints of it, among other things."""
    limits: Limits = Limits(seconds=4.0)  # noqa: RUF009


QUICK = Limits(seconds=0.3)
ATTACKS: dict[str, Attack] = {}
# fmt: off


def attack(kind: str, name: str, code: str, before: str = "", **more: object) -> None:
    if before is not KERNEL or platform.machine() == "x86_64":
        ATTACKS[name] = Attack(before + code, kind, **more)  # type: ignore[arg-type]


# ------------------------------------------------------------------ network

attack("network", "tcp", """
import socket
attempt("tcp", lambda: socket.create_connection(("127.0.0.1", {port}), 1))
""", TRY)
attack("network", "udp", """
import socket
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {port})))
attempt("udp6", lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
attempt("name", lambda: socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM) and socket.socket())
""", TRY)
attack("network", "unix socket", """
import socket
def join(address):
    s = socket.socket(socket.AF_UNIX)
    s.connect(address)
attempt("path", join, {socket!r})
attempt("abstract", join, "\\0" + {abstract!r})
""", TRY)
attack("network", "raw socket", """
for family in (1, 2, 10, 16, 17, 40):
    for kind in (1, 2, 3, 5):
        tried(f"socket {{family}} {{kind}}", 41, family, kind, 0)
tried("accept", 43, 0, 0, 0)
tried("sendto", 44, 1, b"x", 1, 0, 0, 0)
""", KERNEL)
attack("network", "datagram by socketpair", """
import socket
def pair():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    a.sendto(b"through", {socket!r} + ".datagrams")
attempt("pair", pair)
attempt("stream", lambda: socket.socketpair())
""", TRY)
attack("network", "io_uring", """
parameters = ctypes.create_string_buffer(256)
tried("io_uring", 425, 4, ctypes.byref(parameters))
tried("enter", 426, 0, 0, 0, 0, 0)
tried("aio", 206, 8, ctypes.byref(parameters))
""", KERNEL)

# ------------------------------------------------------------------ processes

attack("processes", "fork bomb", """
import os
def bomb():
    while True:
        os.fork()
attempt("fork", bomb)
""", TRY)
attack("processes", "fork by number", """
tried("fork", 57)
""", KERNEL)
attack("processes", "vfork by number", """
found = call(58)
if found == 0:
    call(60, 0)
if found >= 0:
    print("ESCAPED vfork", found)
""", KERNEL)
attack("processes", "clone3", """
import struct
for flags in (0, 0x10000000, 0x20000, 0x00010f00):
    asked = struct.pack("=11Q", flags, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
    found = call(435, asked, len(asked))
    if found >= 0:
        print("ESCAPED clone3", flags, found)
        os._exit(0)
""", KERNEL)
attack("processes", "clone without thread", """
for flags in (17, 0x10000011, 0x02000011, 0x8000 | 17):
    found = call(56, flags, 0, 0, 0, 0)
    if found >= 0:
        print("ESCAPED clone", hex(flags), found)
        os._exit(0)
""", KERNEL)
attack("processes", "subprocess", """
import subprocess
attempt("shell", lambda: subprocess.run("echo hi", shell=True))
attempt("python", lambda: subprocess.run([sys.executable, "-c", "1"]))
import os
attempt("system", lambda: 1 / (os.system("true") == 0))
attempt("popen", lambda: os.popen("true").read())
""", TRY)
attack("processes", "execve", """
import os
attempt("execve", lambda: os.execve("/bin/sh", ["sh", "-c", "echo ESCAPED"], {{}}))
attempt("own", lambda: os.execve("/proc/self/exe", ["python", "-c", "print('ESCAPED')"], {{}}))
""", TRY)
attack("processes", "execveat", """
arguments = (ctypes.c_char_p * 2)(b"sh", None)
tried("execveat", 322, -100, b"/bin/sh", arguments, arguments, 0)
""", KERNEL)
attack("processes", "posix_spawn", """
import os
attempt("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {{}}))
""", TRY)
attack("processes", "thread bomb", """
import threading, time
threading.stack_size(32768)
started = 0
try:
    for _ in range(5000):
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
        started += 1
except BaseException as problem:
    print(type(problem).__name__)
if started > 64:
    print("ESCAPED", started)
""")

# ------------------------------------------------------------------ memory

attack("memory", "at once", """
attempt("4 GiB", lambda: len(bytearray(4 * 2**30)))
import mmap
attempt("untouched", lambda: mmap.mmap(-1, 4 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
""", TRY)
attack("memory", "by pieces", """
held = []
def grow():
    for _ in range(100):
        held.append(bytearray(40 * 2**20))
attempt("pieces", grow)
""", TRY, ended=("", "time"))
attack("memory", "shared mmap", """
import mmap
attempt("shared", lambda: mmap.mmap(-1, 2**30))
""", TRY)
attack("memory", "last value", "list(range(10**7))", ended=("", "time"))
attack("memory", "nested value", "x = []\nfor _ in range(10**5):\n    x = [x]\nprint('made')\nx", ended=("", "lost"))
attack("memory", "long message", "raise ValueError('a' * 10**8)", ended=("output",))
attack("memory", "kernel objects", """
tried("shmget", 29, 0, 2**20, 0o1666)
tried("msgget", 68, 0, 0o1666)
tried("semget", 64, 0, 1, 0o1666)
tried("mq_open", 240, b"/x", 0o102, 0o600, 0)
tried("timerfd", 283, 0, 0)
tried("eventfd", 290, 0, 0)
tried("epoll", 291, 0)
tried("inotify", 294, 0)
tried("fanotify", 300, 0, 0)
tried("pipe", 293, ctypes.create_string_buffer(8), 0)
tried("timer", 222, 1, 0, ctypes.create_string_buffer(8))
tried("mlock", 151, 1)
""", KERNEL)

# ------------------------------------------------------------------ disk

attack("disk", "one file", """
def fill():
    with open("big", "wb") as file:
        for _ in range(64):
            file.write(bytes(2**20))
attempt("one file", fill)
""", TRY)
attack("disk", "many files", """
def fill():
    for n in range(100000):
        with open(f"f{{n}}", "wb") as file:
            file.write(bytes(1000))
attempt("many files", fill)
""", TRY)
attack("disk", "several files", """
def fill():
    for n in range(8):
        with open(f"f{{n}}", "wb") as file:
            file.write(bytes(400_000))
attempt("several files", fill)
""", TRY)
attack("disk", "empty files", """
def fill():
    for n in range(5000):
        open(f"f{{n}}", "wb").close()
attempt("empty files", fill)
""", TRY)
attack("disk", "elsewhere", """
import os
for place in ({outside!r}, "/", "/dev/shm", "/var/tmp", "/run", "/usr/lib", "/home", "/root",
              os.path.dirname(os.__file__)):
    attempt(place, lambda: open(place + "/planted", "w"))
    attempt(place, lambda: os.mkdir(place + "/planted.d"))
attempt("truncate", lambda: os.truncate({secret!r}, 0))
attempt("unlink", lambda: os.unlink({secret!r}))
attempt("rename", lambda: os.rename({secret!r}, {secret!r} + "2"))
""", TRY)

# ------------------------------------------------------------------ secrets

attack("secrets", "files", """
for place in ({secret!r}, "/etc/passwd", "/etc/shadow", "/etc/hostname", "/root/.bashrc", "/proc/self/environ"):
    attempt(place, lambda: open(place).read())
import os
for place in ("/", "/etc", "/home", "/root", {outside!r}):
    attempt(place, lambda: os.listdir(place))
""", TRY)
attack("secrets", "environment", """
import os
if len(os.environ) > 4 or any("SECRET" in name for name in os.environ):
    print("ESCAPED", dict(os.environ))
print(len(os.environ))
""")
attack("secrets", "proc", """
import os
for name in ("self/maps", "self/environ", "1/environ", "1/cmdline", "self/root/etc/passwd", "kcore", "mounts",
             "net/tcp", "self/fd", "sys/kernel/core_pattern"):
    attempt(name, lambda: open("/proc/" + name, "rb").read(10))
attempt("list", lambda: os.listdir("/proc"))
attempt("sys", lambda: os.listdir("/sys"))
""", TRY)
attack("secrets", "parent in proc", """
import os
for pid in (os.getppid(), {pid}, 1, 2):
    for name in ("mem", "maps", "environ"):
        attempt(name, lambda: open(f"/proc/{{pid}}/{{name}}", "rb").read(10))
    for name in ("fd", "root", "cwd", "task"):
        attempt(name, lambda: os.listdir(f"/proc/{{pid}}/{{name}}"))
""", TRY)
attack("secrets", "handles and folders", """
import struct
handle = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0), 160)
tried("name_to_handle", 303, -100, b"/", handle, ctypes.byref(ctypes.c_int()), 0)
tried("open_by_handle", 304, 1, ctypes.create_string_buffer(160), 0)
tried("kcmp", 312, os.getpid(), os.getppid(), 2, 0, 0)
tried("pidfd_getfd", 438, 0, 0, 0)
tried("quotactl", 179, 0x80000100, 0, 0, 0)
tried("lookup_dcookie", 212, 0, 0, 0)
place = os.open(".", 0x200000)
for up in ("../etc/passwd", "../../../../etc/passwd"):
    try:
        os.open(up, os.O_RDONLY, dir_fd=place)
        print("ESCAPED", up)
    except OSError as problem:
        print(problem.errno)
""", KERNEL)
attack("secrets", "words for the next to find", """
words = ["PLANTED-BY-ANOTHER" + "!" for _ in range(1000)]
print(len(words))
""")
attack("secrets", "earlier programs", """
import ctypes, gc
word = "-".join(["PLANTED", "BY", "ANOTHER"])
def holds(thing):
    return isinstance(thing, str) and thing is not word and word in thing and len(thing) < 10**6
held = [o for d in gc.get_objects() if isinstance(d, dict) for o in list(d.values()) if holds(o)]
if held:
    print("ESCAPED", held[0][:80])
end = ctypes.CDLL(None).sbrk
end.restype = ctypes.c_void_p
top = end(0)
for size in (2**19, 2**20, 3 * 2**20):
    heap = ctypes.string_at(top - size, size)
    if heap.count(word.encode()) > 5:
        print("ESCAPED heap", heap.count(word.encode()))
""", ended=("", "lost"))

# ------------------------------------------------------------------ the parent

attack("parent", "signals", """
import os
for pid in (os.getppid(), {pid}, 1, 2, -1, 0):
    attempt(f"kill {{pid}}", lambda: os.kill(pid, 0))
    attempt(f"kill {{pid}}", lambda: os.kill(pid, 15))
""", TRY)
attack("parent", "signals by number", """
for pid in (os.getppid(), {pid}):
    tried("kill", 62, pid, 9)
    tried("tkill", 200, pid, 9)
    tried("tgkill", 234, pid, pid, 9)
    tried("sigqueue", 129, pid, 9, ctypes.create_string_buffer(128))
    tried("pidfd", 434, pid, 0)
    tried("pidfd_send", 424, 0, 9, 0, 0)
""", KERNEL)
attack("parent", "signals by file owner", """
import fcntl
def owner(pid):
    fcntl.fcntl(1, fcntl.F_SETOWN, pid)
    fcntl.fcntl(1, 10, 9)
    fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | os.O_ASYNC)
    return True
import os
for pid in (os.getppid(), {pid}):
    attempt("owner", owner, pid)
    attempt("set sig", fcntl.fcntl, 1, 10, 9)
    attempt("async", fcntl.ioctl, 1, 0x5452, (1).to_bytes(4, "little"))
    attempt("owner by ioctl", fcntl.ioctl, 1, 0x8901, pid.to_bytes(4, "little"))
    attempt("lease", fcntl.fcntl, 0, 1024, 0)
    attempt("notify", fcntl.fcntl, 0, 1026, 1)
""", TRY)
attack("parent", "ptrace", """
for pid in (os.getppid(), {pid}):
    tried("attach", 101, 16, pid, 0, 0)
    tried("seize", 101, 0x4206, pid, 0, 0)
tried("trace me", 101, 0, 0, 0, 0)
""", KERNEL)
attack("parent", "process_vm", """
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(8)
here, there = Piece(ctypes.addressof(room), 8), Piece(0x400000, 8)
for pid in (os.getppid(), {pid}):
    tried("read", 310, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    tried("write", 311, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
""", KERNEL)
attack("parent", "prlimit", """
import struct
limit = struct.pack("=QQ", 1, 1)
for pid in (os.getppid(), {pid}):
    tried("set", 302, pid, 7, limit, 0)
    tried("look", 302, pid, 7, 0, ctypes.create_string_buffer(16))
tried("own", 302, 0, 9, struct.pack("=QQ", 2**63, 2**63), 0)
tried("setrlimit", 160, 9, struct.pack("=QQ", 2**63, 2**63))
""", KERNEL)
attack("parent", "priority", """
for pid in (0, os.getppid(), {pid}):
    tried("setpriority", 141, 0, pid, -20)
    tried("affinity", 203, pid, 8, ctypes.create_string_buffer(b"\\1" + bytes(7)))
    tried("ioprio", 251, 1, pid, 0)
    tried("scheduler", 144, pid, 1, ctypes.create_string_buffer(b"\\1" + bytes(7)))
    tried("setpgid", 109, pid, 0)
tried("setsid", 112)
""", KERNEL)

# ------------------------------------------------------------------ time

TIMED = {"ended": ("time",), "limits": QUICK}
attack("time", "busy", "while True: pass", **TIMED)
attack("time", "sleep", "import time\ntime.sleep(60)", **TIMED)
attack("time", "output closed", """
import os, time
os.close(1), os.close(2), os.close(0)
while True: pass
""", **TIMED)
attack("time", "signals ignored", """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass
""", **TIMED)
attack("time", "exceptions caught", """
while True:
    try:
        while True: pass
    except BaseException:
        pass
""", **TIMED)
attack("time", "loop in C", "sum(range(10**12))", **TIMED)
attack("time", "regex", "import re\nre.match(r'(a+)+$', 'a' * 64 + 'b')", **TIMED)
attack("time", "recursion", """
import sys
sys.setrecursionlimit(10**9)
def f(n): return f(n + 1) + 1
f(0)
""", ended=("", "time", "lost"), limits=Limits(seconds=1.0))
attack("time", "big number", "print(len(str(10 ** 10**9)))", ended=("", "time"), limits=QUICK)

# ------------------------------------------------------------------ output

attack("output", "flood", "while True: print('x' * 1000)", ended=("output",))
attack("output", "flood without lines", """
import sys
while True:
    sys.stdout.write("y" * 100000)
""", ended=("output",))
attack("output", "flood by number", """
import os
while True:
    os.write(1, b"z" * 65536)
""", ended=("output",))
attack("output", "into the protocol", """
import os
forged = b'{{"exit": 0, "ended": "", "seconds": 0, "peak": 0, "clean": true}}\\n'
for number in range(3, 300):
    try:
        os.write(number, forged)
        print("ESCAPED", number)
    except OSError:
        pass
print(forged.decode())
""", says='"clean": true')
attack("output", "reading the protocol", """
import os
for number in (0, *range(3, 300)):
    try:
        found = os.read(number, 100)
        if found:
            print("ESCAPED", number, found)
    except OSError:
        pass
""")
attack("output", "input grows", """
import os
def grow():
    os.lseek(0, 0, 2)
    return os.write(0, bytes(2**20))
attempt("write", grow)
attempt("truncate", lambda: os.ftruncate(0, 2**30))
""", TRY)

# ------------------------------------------------------------------ links

attack("links", "symlink", """
import os
attempt("symlink", lambda: os.symlink({secret!r}, "link") or open("link").read())
attempt("chain", lambda: os.symlink("/", "root") or os.listdir("root"))
""", TRY)
attack("links", "hard link", """
import os
attempt("link", lambda: os.link({secret!r}, "link"))
attempt("other", lambda: os.link(os.__file__, "link"))
attempt("fifo", lambda: os.mkfifo("pipe"))
attempt("node", lambda: os.mknod("device", 0o20666, os.makedev(1, 1)))
""", TRY)

# ------------------------------------------------------------------ privileges

attack("privileges", "identity", """
import os
attempt("setuid", os.setuid, 0)
attempt("setgid", os.setgid, 0)
attempt("setgroups", os.setgroups, [0])
attempt("chroot", os.chroot, ".")
attempt("chmod", os.chmod, ".", 0o7777)
attempt("chown", os.chown, ".", 0, 0)
attempt("xattr", os.setxattr, ".", "user.note", b"planted")
attempt("utime", os.utime, ".", (0, 0))
""", TRY)
attack("privileges", "mounts and namespaces", """
tried("mount", 165, b"tmpfs", b".", b"tmpfs", 0, 0)
tried("umount", 166, b"/tmp", 2)
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000, 0x80):
    tried(f"unshare {{flag:x}}", 272, flag)
tried("setns", 308, 0, 0)
tried("pivot_root", 155, b".", b".")
tried("open_tree", 428, -100, b"/", 1)
tried("fsopen", 430, b"tmpfs", 0)
tried("move_mount", 429, -100, b"/", -100, b".", 0)
tried("mount_setattr", 442, -100, b"/", 0, ctypes.create_string_buffer(32), 32)
""", KERNEL)
attack("privileges", "newer corners", """
tried("bpf", 321, 0, ctypes.create_string_buffer(128), 128)
tried("keyctl", 250, 0, -3, 1)
tried("add_key", 248, b"user", b"x", b"y", 1, -3)
tried("perf", 298, ctypes.create_string_buffer(128), 0, -1, -1, 0)
tried("userfaultfd", 323, 1)
tried("memfd", 319, b"x", 0)
tried("memfd_secret", 447, 0)
tried("personality", 135, 0x40000)
tried("iopl", 172, 3)
tried("modify_ldt", 154, 1, ctypes.create_string_buffer(16), 16)
tried("swapon", 167, b"x", 0)
tried("reboot", 169, 0xfee1dead, 672274793, 0, 0)
tried("init_module", 175, b"", 0, b"")
tried("kexec", 246, 0, 0, 0, 0)
tried("clock_settime", 227, 0, ctypes.create_string_buffer(16))
tried("sethostname", 170, b"x", 1)
tried("vmsplice", 278, 1, 0, 0, 0)
tried("futex_waitv", 449, 0, 0, 0, 0, 0)
tried("syslog", 103, 3, ctypes.create_string_buffer(16), 16)
""", KERNEL)
attack("privileges", "numbers that do not exist", """
for number in (*range(336, 424), *range(425, 435), *range(436, 600), 1000):
    tried(str(number), number, 0, 0, 0, 0, 0, 0)
""", KERNEL)
attack("privileges", "x32", """
print("getpid by x32", call(0x40000000 + 39))
print("ESCAPED")
""", KERNEL, ended=("lost",))
attack("privileges", "32 bits", """
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print("getpid by int 80", function())
print("ESCAPED")
""", KERNEL, ended=("lost",))
attack("privileges", "undoing the filter", """
import struct
allow = struct.pack("=HBBI", 6, 0, 0, 0x7fff0000)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]
program = Program(1, allow)
tried("prctl", 157, 22, 2, ctypes.byref(program), 0, 0)
tried("seccomp", 317, 1, 0, ctypes.byref(program))
tried("notify", 317, 1, 8, ctypes.byref(program))
tried("no new privileges", 157, 38, 0, 0, 0, 0)
tried("death", 157, 1, 0, 0, 0, 0)
tried("keep", 157, 8, 1, 0, 0, 0)
tried("dumpable", 157, 4, 1, 0, 0, 0)
tried("subreaper", 157, 36, 1, 0, 0, 0)
tried("capset", 126, struct.pack("=Ii", 0x20080522, 0), b"\\xff" * 24)
tried("landlock", 444, 0, 0, 1)
""", KERNEL)
attack("privileges", "devices", """
import os
for name in ("mem", "kmem", "sda", "vda", "kvm", "fuse", "net/tun", "tty", "ptmx", "pts/0", "console",
             "loop-control", "kmsg"):
    attempt(name, lambda: open("/dev/" + name, "rb"))
    attempt(name, lambda: open("/dev/" + name, "wb"))
""", TRY)
attack("privileges", "terminal push", """
import fcntl
for number in (0, 1, 2):
    attempt("push", fcntl.ioctl, number, 0x5412, b"x")
    attempt("control", fcntl.ioctl, number, 0x540e, 1)
    attempt("selection", fcntl.ioctl, number, 0x541c, b"\\2")
""", TRY)

# ------------------------------------------------------------------ the next program

attack("next", "plant files", """
import os
try:
    open("PLANTED-IN-CODE", "w").write("x")
    os.makedirs("a/b/c/d")
    open("a/b/c/d/e", "w").write("x")
except OSError as problem:
    print(problem)
""")
attack("next", "plant in pipes", """
import fcntl, os
attempt("flags", lambda: fcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK | os.O_WRONLY))
attempt("blocking", lambda: os.set_blocking(1, False))
attempt("size", lambda: fcntl.fcntl(1, 1031, 4096))
attempt("nonblocking by ioctl", lambda: fcntl.ioctl(1, 0x5421, (1).to_bytes(4, "little")))
""", TRY)
attack("next", "plant in modules", """
import builtins, json, sys
builtins.print = None
json.dumps = lambda *a, **k: "ESCAPED"
sys.modules["math"] = None
builtins.PLANTED = 1
""")
attack("next", "plant in the interpreter", """
import ctypes
one = ctypes.c_long.from_address(id(1) + 24)
one.value = 7
""", ended=("", "lost"))
attack("next", "look", """
import builtins, os, json
try:
    found = os.listdir(".")
except OSError:
    found = []
if found or hasattr(builtins, "PLANTED") or json.dumps(1) != "1":
    print("ESCAPED", found)
""")
attack("next", "folder locked", """
import os
try:
    os.mkdir("d", 0)
    os.umask(0o777)
    open("locked", "w").close()
    os.rename("d", "e")
except OSError as problem:
    print(problem)
attempt("removed", lambda: os.rmdir(os.getcwd()))
""", TRY)

# ------------------------------------------------------------------ crashes

attack("crashes", "segfault", """
import ctypes
ctypes.string_at(0)
print("ESCAPED")
""", ended=("lost",))
attack("crashes", "surrogates", "print('\\ud800 \\udfff')")
attack("crashes", "bytes that are no text", "import sys\nsys.stdout.buffer.write(bytes(range(256)))")
attack("crashes", "abort", "import os\nos.abort()", ended=("", "lost"))
attack("crashes", "exit at once", "import os\nos._exit(0)")
attack("crashes", "exit code", "import sys\nsys.exit(10**30)")
attack("crashes", "deep syntax", "x = " + "(" * 5000 + ")" * 5000)
attack("crashes", "nul and no newline", "x = '\\0'\nprint(x, end='')")
attack("crashes", "three megabytes of code", "x = '" + "a" * 3_000_000 + "'\nprint(len(x))")
attack("crashes", "exception that raises", """
class Bad(Exception):
    def __str__(self): raise Bad
raise Bad
""")
attack("crashes", "alarm", """
import signal
signal.setitimer(signal.ITIMER_REAL, 0.01)
while True: pass
""", ended=("lost", "time"), limits=QUICK)
