// Which of two ranks that wait on one core leaves it, and when; and that ranks which come to sit on one do.
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "../shm/api.h"
#include "../shm/layout.h"
#include "../shm/reduce.h"
#include "../shm/seat.h"
#include "require.h"
#include "tickets.h"

using namespace c10d_custom;

namespace {

constexpr int64_t kMilli = 1000 * 1000;

cpu_set_t cores_of_this_thread() {
  cpu_set_t cores;
  require(!sched_getaffinity(0, sizeof cores, &cores), "no affinity");
  return cores;
}

void choices() {
  Seat mine{}, its{};
  SeatChoice choice;
  int64_t now = 1000 * kMilli;
  static bool free;
  free = true;
  auto leaves = [&](int64_t at, int core) { return choice.leaves(at, core, mine, its, [] { return free; }); };
  require(!leaves(now, 3), "left a core on which nobody is known to be");
  its.word = Seat::taken(now, 2);
  require(!leaves(now, 3), "left a core of its own");
  its.word = Seat::taken(now, 3);
  require(leaves(now, 3), "stayed on a core that it shares");
  require(mine.word == 0, "left its core, and is said to be there");
  require(!leaves(now, 3), "left again at once, where it had not helped");
  require(mine.word != 0, "yields, and does not say where");
  require(!leaves(now + 5 * kMilli, 3), "left for what the other has said long ago");
  int times = 0;
  for (int64_t ms = 1; ms < 2000; ++ms) {
    its.word = Seat::taken(now + ms * kMilli, 3);
    times += leaves(now + ms * kMilli, 3);
  }
  require(times >= 10 && times <= 40, "where no core is free: tries too often, or no more");
  now += 3000 * kMilli;
  its.word = Seat::taken(now, 3);
  require(leaves(now, 3), "did not leave the core that it shares once more after a while");
  require(!choice.leaves(now + 3000 * kMilli, 3, its, its, [] { return true; }), "left itself");
  free = false;
  now += 6000 * kMilli;
  its.word = Seat::taken(now, 3);
  require(!leaves(now, 3), "left its core for other work, where all are taken");
  free = true;
  its.word = Seat::taken(now + 3 * kMilli, 3);
  require(leaves(now + 3 * kMilli, 3), "stayed on a core that it shares, when another had become free");
}

void where_there_is_one_core() {
  cpu_set_t all = cores_of_this_thread(), one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  require(!sched_setaffinity(0, sizeof one, &one), "cannot be bound");
  require(!core_is_free(), "may run on one core, and looks for another");
  require(!sched_setaffinity(0, sizeof all, &all), "cannot be let go");
}

// Two ranks, brought to one core and let go: in so many calls one of them has slept, or is elsewhere; but
// where other work has all cores.
void two_ranks(bool messages) {
  const cpu_set_t all = cores_of_this_thread();
  if (CPU_COUNT(&all) < 2) return;
  constexpr int kCalls = 2000;
  const Geometry geometry{2, 4, 65536, 16384, 65536, 8, 0};
  uint64_t bytes;
  const int segment = c10d_segment_create(&geometry, &bytes), core = sched_getcpu();
  require(segment >= 0, "no segment");
  c10d_handle* groups[2];
  for (uint32_t r = 0; r < 2; ++r) require(!c10d_open(dup(segment), r, 200 * 1000, nullptr, &groups[r]), "cannot open");
  close(segment);
  std::atomic<int> there{0};
  std::atomic<bool> left{false}, busy{false};
  auto rank = [&](uint32_t me) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    require(!sched_setaffinity(0, sizeof one, &one), "cannot be bound");
    ++there;
    while (there < 2) sched_yield();
    require(!sched_setaffinity(0, sizeof all, &all), "cannot be let go");
    rusage before, now;
    getrusage(RUSAGE_THREAD, &before);
    for (int i = 0; i < kCalls; ++i) {
      int32_t value = 1;
      Span span{&value, sizeof value};
      for (uint32_t turn = 0; messages && turn < 2; ++turn) {
        MessageArgs m{};
        m.data = span, m.peer = int32_t(1 - me), m.is_recv = (turn + me) % 2, m.timeout_ns = 60000 * kMilli;
        c10d_ticket* const ticket = c10d_post(groups[me], &m);
        Failure failure;
        require(c10d_wait(groups[me], ticket, 60000 * kMilli, 1, &failure) == kOk, "a message failed");
        c10d_release(ticket);
      }
      CallArgs a{};
      a.op = kAllReduce, a.redop = kSum, a.dtype = kInt32, a.root = -1, a.count = 1, a.item_bytes = 4;
      a.timeout_ns = 60000 * kMilli, a.nin = a.nout = 1, a.in = a.out = &span;
      if (!messages) require(c10d_run(groups[me], &a) == kOk, "a call failed");
      if (sched_getcpu() != core) left = true;
      if (i % 100 == 0 && !core_is_free()) busy = true;
    }
    getrusage(RUSAGE_THREAD, &now);
    if (now.ru_nvcsw > before.ru_nvcsw) left = true;  // a yield is no voluntary switch, a sleep is
    cpu_set_t after = cores_of_this_thread();
    require(CPU_EQUAL(&after, &all), "the affinity has changed");
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
  require(left || busy, "two ranks on one core only ever yielded to each other");
  for (c10d_handle* g : groups) c10d_close(g);
  for (c10d_handle* g : groups) c10d_free(g);
}

}  // namespace

int main() {
  choices();
  where_there_is_one_core();
  two_ranks(false);
  two_ranks(true);
}
