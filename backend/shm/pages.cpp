#include "pages.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "room.h"

#ifndef MADV_POPULATE_WRITE  // Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace c10d_custom {
namespace {

constexpr uint64_t kPiece = 4 << 20;
constexpr uint64_t kPlenty = 1 << 30;  // so much that it does not matter whether a few hundred ask at once

// Before Linux 6.11 fallocate undoes what it has done where a signal is pending, and a program with an interval timer
// would never get through.
class SignalsLater {
 public:
  SignalsLater() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsLater() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

bool refused(int error) { return error == EPERM || error == EACCES || error == ENOSYS || error == EOPNOTSUPP; }

// Where a sandbox refuses fallocate, pages come by being touched: not by a store, which would be a SIGBUS where there
// are none, nor by a write of zeros, for another rank may have written there already.
int take_piece(int fd, uint64_t from, char* at, uint64_t bytes) {
  const SignalsLater later;
  if (!fallocate(fd, 0, off_t(from), off_t(bytes))) return 0;
  const int error = errno;
  if (!refused(error)) return error;
  const uintptr_t begin = uintptr_t(at) / page_bytes() * page_bytes();
  if (!madvise(reinterpret_cast<void*>(begin), uintptr_t(at) + bytes - begin, MADV_POPULATE_WRITE)) return 0;
  return errno == EFAULT ? ENOSPC : errno == ENOMEM || errno == EINTR || errno == EAGAIN ? errno : error;
}

}  // namespace

uint64_t page_bytes() {
  static const auto bytes = uint64_t(sysconf(_SC_PAGESIZE));
  return bytes;
}

int take_pages(int fd, uint64_t from, char* at, uint64_t bytes, const GoesOn& goes_on) {
  const Room room;
  if (room.left(bytes) < bytes) return ENOMEM;
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t piece = std::min(kPiece, bytes - done);
    if (goes_on && !goes_on()) return ECANCELED;
    std::optional<RoomLock> alone;
    if (room.left(kPlenty) < kPlenty) {
      alone.emplace(room);
      if (room.left(piece) < piece) return ENOMEM;
    }
    const int error = take_piece(fd, from + done, at + done, piece);
    if (error == EINTR || error == EAGAIN) continue;
    if (error) return error;
    done += piece;
  }
  return 0;
}

void give_back_pages(int fd, uint64_t from, char* at, uint64_t bytes) {
  int failed;
  do failed = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(from), off_t(bytes));
  while (failed && errno == EINTR);
  if (failed) madvise(at, bytes, MADV_REMOVE);
}

void* map_pages(int fd, uint64_t from, uint64_t bytes) {
  // Mapped without access first: mlockall(MCL_FUTURE) then fills nothing. Unlocked before there is access.
  void* const at = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, fd, off_t(from));
  if (at == MAP_FAILED) return at;
  munlock(at, bytes);
  if (!mprotect(at, bytes, PROT_READ | PROT_WRITE)) return at;
  const int error = errno;
  munmap(at, bytes);
  errno = error;
  return MAP_FAILED;
}

}  // namespace c10d_custom
