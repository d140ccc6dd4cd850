// A machine whose pages have C10D_TEST_PAGE_BYTES, to a program that has this preloaded: it is told so, and what it
// maps has to begin at a multiple of them, at its address and in its file, and goes to the end of the last one.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { kReal = 4096 };

static size_t page(void) {
  static size_t bytes;
  if (!bytes) bytes = strtoul(getenv("C10D_TEST_PAGE_BYTES"), NULL, 10);
  return bytes;
}

static size_t whole(size_t bytes) { return (bytes + page() - 1) / page() * page(); }
static long refused(void) { return errno = EINVAL, -1; }
static int off_a_page(const void* at) { return (size_t)at % page() != 0; }

long sysconf(int name) {
  static long (*real)(int);
  if (!real) *(void**)&real = dlsym(RTLD_NEXT, "sysconf");
  if (name == _SC_PAGESIZE) return (long)page();
  const long value = real(name);
  return name == _SC_PHYS_PAGES || name == _SC_AVPHYS_PAGES ? value / (long)(page() / kReal) : value;
}

int getpagesize(void) { return (int)page(); }

void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if ((size_t)offset % page() || (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE) && off_a_page(at))) return (void*)refused();
  bytes = whole(bytes);
  if (!(flags & (MAP_FIXED | MAP_FIXED_NOREPLACE))) {
    const long room =
        syscall(SYS_mmap, NULL, bytes + page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == -1) return MAP_FAILED;
    const size_t begin = whole((size_t)room), before = begin - (size_t)room;
    if (before) syscall(SYS_munmap, room, before);
    syscall(SYS_munmap, begin + bytes, page() - before);
    at = (void*)begin, flags |= MAP_FIXED;
  }
  return (void*)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

void* mmap64(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return mmap(at, bytes, protection, flags, fd, offset);
}

int munmap(void* at, size_t bytes) { return (int)(off_a_page(at) ? refused() : syscall(SYS_munmap, at, whole(bytes))); }

int madvise(void* at, size_t bytes, int advice) {
  return (int)(off_a_page(at) ? refused() : syscall(SYS_madvise, at, whole(bytes), advice));
}

int mprotect(void* at, size_t bytes, int protection) {
  return (int)(off_a_page(at) ? refused() : syscall(SYS_mprotect, at, whole(bytes), protection));
}
