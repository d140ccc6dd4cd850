// What a group of many ranks costs, counted: the memory that it has when it is made, and the system calls of who waits
// for one rank that is late, or for all; that the end of a rank is every other one's error; and what they compute.
// Ranks are processes: a thread of one's own process is alive without a question.
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
#include <vector>

#include "../shm/api.h"
#include "../shm/layout.h"
#include "../shm/reduce.h"
#include "require.h"
#include "tickets.h"

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

struct Taken {
  uint64_t from, bytes;
};
static std::vector<Taken> taken;  // pages of files, by this process

extern "C" int __real_fallocate(int fd, int mode, off_t from, off_t bytes);
extern "C" int __wrap_fallocate(int fd, int mode, off_t from, off_t bytes) {
  taken.push_back({uint64_t(from), uint64_t(bytes)});
  return __real_fallocate(fd, mode, from, bytes);
}

namespace {

constexpr int64_t kSecond = 1000 * 1000 * 1000;
constexpr uint32_t kRanks = 64;

Geometry geometry(uint32_t ranks) {
  Geometry g{ranks, 8, 128 << 10, 16 << 10, 16 << 10, 32, 0, 0};
  g.fan_in = ranks >= kManyRanks ? 8 : 0;
  g.two_steps_bytes = 4096;
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
    taken.clear();
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

Status call(c10d_handle* g, Op op, uint64_t count, std::vector<Span> in, std::vector<Span> out, Failure* f) {
  CallArgs a{};
  a.op = op, a.redop = kSum, a.dtype = kInt64, a.root = op == kGather || op == kScatter ? 3 : -1, a.count = count,
  a.item_bytes = 8;
  a.timeout_ns = 60 * kSecond;
  a.nin = uint32_t(in.size()), a.in = in.data(), a.nout = uint32_t(out.size()), a.out = out.data();
  const Status st = Status(c10d_run(g, &a));
  c10d_last_failure(f);
  return st;
}

// Sums of all sizes, by both ways of small ones and by the rings.
void sums() {
  ranks([](c10d_handle* g, uint32_t r) {
    Failure f;
    for (uint64_t items : {1ul, 9ul, 511ul, 512ul, 1000ul, 2048ul, 2049ul, 40000ul}) {
      std::vector<int64_t> v(items);
      for (uint64_t i = 0; i < items; ++i) v[i] = int64_t(r * 1000 + i);
      const Span s{v.data(), items * 8};
      require(call(g, kAllReduce, items, {s}, {s}, &f) == kOk, "all_reduce of items", long(items));
      for (uint64_t i = 0; i < items; ++i)
        require(v[i] == int64_t(1000 * kRanks * (kRanks - 1) / 2 + kRanks * i), "sum of item", long(i));
    }
  });
}

// Whoever writes to it most takes the memory of each part, and so has it on its own node: nobody another's.
void pages_are_their_ranks() {
  taken.clear();
  ranks([](c10d_handle* g, uint32_t r) {
    Failure f;
    std::vector<int64_t> v(1 << 15), parts(kRanks << 12);
    const Span s{v.data(), v.size() * 8}, small{v.data(), 8}, part{v.data(), 8 << 12};
    require(call(g, kAllReduce, 1, {small}, {small}, &f) == kOk, "small all_reduce", r);
    std::vector<Span> all;
    for (uint32_t p = 0; p < kRanks && r == 3; ++p) all.push_back({&parts[p << 12], 8 << 12});
    require(call(g, kScatter, 1 << 12, all, {part}, &f) == kOk, "scatter", r);
    require(call(g, kAllReduce, v.size(), {s}, {s}, &f) == kOk, "all_reduce", r);
    const Layout l(geometry(kRanks));
    uint64_t own = 0;
    for (const auto& [from, bytes] : taken) {
      bool mine = false;
      for (const auto& [begin, each] : {std::pair(l.ctl, l.ctl_bytes), std::pair(l.tables, l.table_bytes),
                                        std::pair(l.small, 2 * l.small_bytes), std::pair(l.rings, l.ring_bytes)})
        mine = mine || (from + 4096 > begin + r * each && from + bytes < begin + (r + 1) * each + 4096);
      require(mine, "memory of another rank, taken by", r);
      own += bytes;
    }
    require(own >= l.ring_bytes + 2 * l.small_bytes, "memory that it took itself", long(own));
  });
  // The maker's: of no rank's RankCtl.
  const Layout l(geometry(kRanks));
  for (const auto& [from, bytes] : taken)
    require(from + bytes <= l.ctl || from >= l.has_cells, "RankCtls that the maker took", long(from));
}

// One rank's count differs: every other rank's error names it, and it one of the others.
void one_differs() {
  for (const uint32_t deviant : {0u, 17u, kRanks - 1}) {
    ranks([&](c10d_handle* g, uint32_t r) {
      Failure f;
      std::vector<int64_t> v(8);
      const uint64_t items = r == deviant ? 5 : 4;
      const Span s{v.data(), items * 8};
      require(barrier(g, &f) == kOk, "barrier", r);
      require(call(g, kAllReduce, items, {s}, {s}, &f) == kMismatch, "a call that differs", r);
      require((r == deviant) != (f.peer == int32_t(deviant)), "whom it names", f.peer);
    });
  }
}

// Every pair's own size, and a gather of parts that differ; then two ranks do not agree on one, and nobody is written
// to.
void uneven() {
  ranks([](c10d_handle* g, uint32_t r) {
    Failure f;
    for (uint32_t call_ = 0; call_ < 3; ++call_) {
      const bool last = call_ == 2;
      auto items = [&](uint32_t from, uint32_t to) {
        return uint64_t((from + 2 * to + call_) % 3) * (call_ ? 300 : 1);
      };
      std::vector<std::vector<int64_t>> sent(kRanks), got(kRanks);
      std::vector<Span> in, out;
      for (uint32_t p = 0; p < kRanks; ++p) {
        sent[p].assign(items(r, p) + 1, r * 1000 + p), got[p].assign(items(p, r) + 1, -1);
        in.push_back({sent[p].data(), (items(r, p) + (last && r == 7 && p == 40)) * 8});
        out.push_back({got[p].data(), items(p, r) * 8});
      }
      const Status st = call(g, kAllToAll, kNever, in, out, &f);
      require(st == (last ? kMismatch : kOk), "all_to_all", st);
      for (uint32_t p = 0; p < kRanks; ++p)
        for (uint64_t i = 0; i <= items(p, r); ++i)
          require(got[p][i] == (last || i == items(p, r) ? -1 : int64_t(p * 1000 + r)), "from rank", p);
      if (last) return;

      std::vector<int64_t> part(r % 5 + 1, r), whole(kRanks * 5, -1);
      std::vector<Span> parts;
      for (uint32_t p = 0; p < kRanks; ++p) parts.push_back({&whole[p * 5], (p % 5 + 1) * 8});
      if (r != 3) parts.clear();
      const uint64_t count = r == 3 ? kNever : part.size();
      require(call(g, kGather, count, {{part.data(), part.size() * 8}}, parts, &f) == kOk, "gather", r);
      for (uint32_t p = 0; r == 3 && p < kRanks; ++p)
        for (uint64_t i = 0; i < 5; ++i) require(whole[p * 5 + i] == (i <= p % 5 ? int64_t(p) : -1), "part of", p);
    }
  });
}

}  // namespace

int main() {
  memory_when_made();
  one_is_late();
  all_are_late();
  one_dies();
  sums();
  pages_are_their_ranks();
  one_differs();
  uneven();
  std::puts("many_ranks_test: ok");
}
