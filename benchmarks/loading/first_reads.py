"""First reads: every file comes from the disk anew, and some time late.

A library in C, which the system loads before its own (LD_PRELOAD), does that to the files of a folder whenever one is
opened, by whatever program: it drops the file from the page cache and waits. It needs no privileges, but a C compiler.
"""

import atexit
import os
import subprocess
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from loaders.errors import UserError

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int late(const char *path, int handle) {
    const char *folder = getenv("FIRST_READS_OF"), *ms = getenv("FIRST_READS_MS");
    if (handle >= 0 && folder && ms && strncmp(path, folder, strlen(folder)) == 0) {
        posix_fadvise(handle, 0, 0, POSIX_FADV_DONTNEED);
        usleep(1000 * atof(ms));
    }
    return handle;
}

static int mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; }

#define MODE va_list rest; va_start(rest, flags); int mode = mode_of(flags, rest); va_end(rest);
#define OPEN(name) int name(const char *path, int flags, ...) { MODE \
    return late(path, ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode)); }
#define OPENAT(name) int name(int at, const char *path, int flags, ...) { MODE \
    return late(path, ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name))(at, path, flags, mode)); }
#define FOPEN(name) FILE *name(const char *path, const char *how) { \
    FILE *file = ((FILE *(*)(const char *, const char *))dlsym(RTLD_NEXT, #name))(path, how); \
    if (file) late(path, fileno(file)); return file; }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FOPEN(fopen) FOPEN(fopen64)
"""


def prepare() -> None:
    """Let processes that are started from now on :func:`begin`. UserError without a compiler."""
    folder = mkdtemp()
    atexit.register(rmtree, folder)
    library = f"{folder}/first_reads.so"
    call = ["cc", "-w", "-shared", "-fPIC", "-xc", "-", "-o", library, "-ldl"]
    try:
        subprocess.run(call, input=_SOURCE, text=True, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as fault:
        raise UserError("--latency-ms needs a C compiler (cc) and the C library's headers") from fault
    os.environ["LD_PRELOAD"] = library


def begin(folder: Path, latency_ms: float) -> None:
    """Have this process, and those that it starts, open files of ``folder`` late."""
    os.environ |= {"FIRST_READS_OF": f"{folder.absolute()}/", "FIRST_READS_MS": str(latency_ms)}
