// What a group of many ranks costs, counted: the memory that it has when it is made, and the system calls of who waits
// for one rank that is late, or for all; and that the end of a rank is every other one's error. Ranks are processes: a
// thread of one's own process is alive without a question.
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "../shm/api.h"
#include "../shm/layout.h"

using namespace c10d_custom;

static long questions = 0;  // whether a peer is alive

extern "C" int __real_fcntl(int fd, int command, ...);
extern "C" int __wrap_fcntl(int fd, int command, ...) {
  va_list more;
  va_start(more, command);
  void* argument = va_arg(more, void*);
  va_end(more);
  if (command == F_GETLK) ++questions;
  return __real_fcntl(fd, command, argument);
}

namespace {

constexpr int64_t kSecond = 1000 * 1000 * 1000;
constexpr uint32_t kRanks = 64;

void require(bool ok, const char* what, long number) {
  if (ok) return;
  std::fprintf(stderr, "%s: %ld\n", what, number);
  std::abort();
}

Geometry geometry(uint32_t ranks) {
  Geometry g{ranks, 8, 128 << 10, 16 << 10, 16 << 10, 32, 0, 0};
  g.fan_in = ranks >= kManyRanks ? 8 : 0;
  return g;
}

int create(uint32_t ranks) {
  const Geometry g = geometry(ranks);
  uint64_t total;
  const int fd = c10d_segment_create(&g, &total);
  require(fd >= 0, "no segment", fd);
  return fd;
}

uint64_t kilobytes(int fd) {
  struct stat s;
  fstat(fd, &s);
  return uint64_t(s.st_blocks) / 2;
}

void memory_when_made() {
  for (const auto& [ranks, most] : {std::pair(2u, 16ul), std::pair(128u, 256ul), std::pair(1024u, 3072ul)}) {
    const int fd = create(ranks);
    require(kilobytes(fd) <= most, "KiB of a group that is made", long(kilobytes(fd)));
    close(fd);
  }
}

Status barrier(c10d_handle* g, Failure* f) {
  CallArgs a{};
  a.op = kBarrier, a.root = -1, a.item_bytes = 1, a.timeout_ns = 60 * kSecond;
  c10d_ticket* t = c10d_submit(g, &a);
  const Status st = Status(c10d_wait(g, t, 60 * kSecond, 0, f));
  c10d_release(t);
  return st;
}

// What `be` has each rank do, in a process of its own; it may end itself by SIGKILL.
template <class Be>
void ranks(const Be& be) {
  const int fd = create(kRanks);
  for (uint32_t r = 0; r < kRanks; ++r) {
    if (fork()) continue;
    c10d_handle* g;
    require(!c10d_open(dup(fd), r, 0, nullptr, &g), "open", r);
    be(g, r);
    _exit(0);
  }
  close(fd);
  for (uint32_t r = 0; r < kRanks; ++r) {
    int how;
    require(wait(&how) > 0 && (how == 0 || WTERMSIG(how) == SIGKILL), "how a rank ended", how);
  }
}

void one_is_late() {
  ranks([](c10d_handle* g, uint32_t r) {
    Failure f;
    require(barrier(g, &f) == kOk, "first barrier", r);
    questions = 0;
    if (r == 5) sleep(2);
    require(barrier(g, &f) == kOk, "late barrier", r);
    // It looks at most 100 times a second, and has one to ask after.
    require(r == 5 || questions <= 2 * 200, "questions of who waits for one", questions);
  });
}

void all_are_late() {
  ranks([](c10d_handle* g, uint32_t r) {
    Failure f;
    require(barrier(g, &f) == kOk, "first barrier", r);
    questions = 0;
    if (r) sleep(2);
    require(barrier(g, &f) == kOk, "late barrier", r);
    require(r || questions <= (1 + 8 + kRanks / 8) * 200, "questions of who waits for all", questions);
  });
}

void one_dies() {
  for (const uint32_t victim : {0u, 17u, kRanks - 1}) {
    ranks([&](c10d_handle* g, uint32_t r) {
      Failure f;
      require(barrier(g, &f) == kOk, "first barrier", r);
      if (r == victim) {
        usleep(300 * 1000);
        kill(getpid(), SIGKILL);
      }
      const Status st = barrier(g, &f);
      require((st == kPeerLost || (st == kBroken && f.cause == kPeerLost)) && f.peer == int32_t(victim),
              "whom the others name", f.peer);
    });
  }
}

}  // namespace

int main() {
  memory_when_made();
  one_is_late();
  all_are_late();
  one_dies();
  std::puts("many_ranks_test: ok");
}
