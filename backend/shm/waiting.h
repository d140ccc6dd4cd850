// How long each kind of wait stays awake, and what it does then. Of C++, but for a few looks at what is there
// in a moment; of Python: `rest` in threads.py.
//
// clang-format off
//   who waits for                            stays awake                           and then
//   a rank of this host                      1 us looking, then yielding its core; sleeps until it is woken
//                                            where ranks outnumber cores,
//                                            yielding, in a collective
//   what MPI brings                          yielding its core                     sleeps 50 us between looks; after 100 ms, 1 ms
//   what is rare: a rank that leaves arenas, not at all                            sleeps 0.5 ms between looks
//     a lock, what others have called in a
//     disagreement, the users of a handle
//   another thread's part of a copy or sum   a thousand looks                      yields its core (that thread waits for nobody)
//   work, as a thread of ours                a moment, if some has just come       sleeps until it is woken; ends if long unused
// clang-format on
//
// The first microsecond may be the processor's own wait for the line (cpu_relax.h). One setting, C10D_CUSTOM_SPIN_US,
// is the time of the first. The second's is ten times that in a small all_reduce, and one and a half times in all else,
// for nobody wakes who waits for MPI, and a sleep is longer than most answers take.
//
// Where peers have cores of their own they answer in microseconds, and a sleep costs both sides a
// wake-up of ten times that. Where ranks outnumber cores, the answer needs our core: yield it at once and between
// looks, and it goes to the very rank we wait for (4 ranks on 2 cores, a small all_reduce: 3.8 us instead of 7.2). But
// a message is between two ranks, and the others may be asleep: its wait looks for a microsecond before it yields,
// there, too (send and recv, 4 ranks on 2 cores: 8.3 us; 9.1 where it yields at once). Where cores are busy with other
// work, a yield gives that work a whole time slice, and only a sleeper, woken, comes before it: so a yield that took
// longer than ranks hold a core for is the last for a while, and longer and longer as it goes on so.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu_relax.h"
#include "os.h"

namespace c10d_custom {

// A sleeper on this host looks up now and then. All in ns.
constexpr int64_t kSlice = 10 * 1000 * 1000;      // between two looks at its peers' health: a tenth of the time it has
constexpr int64_t kLongSlice = 50 * 1000 * 1000;  // waited, from kSlice to kLongSlice
constexpr int64_t kElsewhere = 100 * 1000;        // between two turns of what the caller wants to have driven
constexpr int64_t kPollInterrupt = 100 * 1000 * 1000;  // between two questions for the interpreter's signal handlers
// Who waits for MPI looks at its peers' health so often.
constexpr int64_t kSliceOverMpi = 2 * 1000 * 1000;

class Spinner {
 public:
  explicit Spinner(int64_t awake_ns) : awake_ns(awake_ns) {}

  const int64_t awake_ns;  // C10D_CUSTOM_SPIN_US

  // Of this process, in all its groups.
  static inline std::atomic<uint32_t> groups_larger_than_their_cores{0};

  // Looks until `done` or the limit; `between` looks it may do something else. Returns whether it is done.
  // `leaves`: asked before the first yield, whether to sleep rather (seat.h). `line`: where `done` looks, if that is
  // one line. `for_all`: whether all ranks of a group are in what it waits for.
  template <class Done, class Between, class Leaves>
  bool spin(int64_t began, int64_t deadline, Done done, Between between, Leaves leaves, const void* line = nullptr,
            bool for_all = true) {
    const Relaxing how = line ? relaxing() : Relaxing::kPause;
    const bool outnumbered = for_all && groups_larger_than_their_cores.load(std::memory_order_relaxed);
    const int64_t looking = outnumbered ? 0 : kSpin;
    int64_t now = began;
    for (const int64_t until = std::min(deadline, began + looking); now < until; now = now_ns())
      for (int i = 0; i < 32; ++i) {
        if (done()) return true;
        if (how == Relaxing::kPause)
          cpu_relax();
        else if (relax_until(line, kCycles, done, how))
          return true;
      }
    if (now < sleep_until_.load(std::memory_order_relaxed) || leaves(now)) return false;
    const int64_t first = now;
    for (const int64_t until = std::min(deadline, began + awake_ns); now < until;) {
      between();
      sched_yield();
      if (done()) {
        count(now - first);
        return true;
      }
      const int64_t before = now;
      now = now_ns();
      if (now - before > kYieldToOthers) {
        count(before - first);
        avoid(now);
        return false;
      }
    }
    count(now - first);
    return false;
  }

 private:
  // Threads may lose each other's; it is an estimate.
  void count(int64_t ns) { yielding_.store(yielding_.load(std::memory_order_relaxed) + ns, std::memory_order_relaxed); }

  void avoid(int64_t now) {
    const bool again = yielding_.load(std::memory_order_relaxed) < kSoon;
    const int64_t next = again ? std::min(4 * avoided_.load(std::memory_order_relaxed), kMost) : kLeast;
    avoided_.store(next, std::memory_order_relaxed);
    yielding_.store(0, std::memory_order_relaxed);
    sleep_until_.store(now + next, std::memory_order_relaxed);
  }

  static constexpr uint32_t kCycles = 1000;                   // of the processor's clock: within the next
  static constexpr int64_t kSpin = 1000;                      // ns: an answer that is under way already
  static constexpr int64_t kYieldToOthers = 2 * 1000 * 1000;  // longer than that, a yield went to other work
  static constexpr int64_t kLeast = 10 * 1000 * 1000, kMost = 2000 * 1000 * 1000;  // ns without a yield
  // ns. Two slow yields with less yielding than this between them have one cause, the same other work: the pause grows.
  // Time spent yielding, not time passed: the group may have been idle in between.
  static constexpr int64_t kSoon = 50 * 1000 * 1000;

  std::atomic<int64_t> sleep_until_{0}, avoided_{kLeast / 4}, yielding_{0};
};

// Between two looks of a wait for what no futex tells of, that has lasted so long and stays awake for `awake_ns`: what
// comes from MPI, or from a rank that polls MPI.
inline void rest_between_looks(int64_t waited_ns, int64_t awake_ns) {
  constexpr int64_t kLong = 100 * 1000 * 1000;  // ns
  if (waited_ns < awake_ns)
    sched_yield();
  else
    usleep(waited_ns < kLong ? 50 : 1000);
}

// Of a small all_reduce; and of all else, where ranks may outnumber cores and others have copies to make meanwhile.
inline int64_t awake_over_mpi(int64_t awake_ns) { return 10 * awake_ns; }
inline int64_t awake_amid_transfers(int64_t awake_ns) { return awake_ns * 3 / 2; }

// The same of a wait that seldom happens, and may end late.
inline void rest_between_rare_looks() { usleep(500); }

// For a part that another thread of this process has begun.
template <class Done>
void wait_for_a_part(Done done) {
  for (uint32_t looks = 0; !done(); ++looks)
    if (looks < 1000)
      cpu_relax();
    else
      sched_yield();  // it may need this core
}

// Of threads that wait for work, in ns.
namespace idle {
constexpr int64_t kPartAwake = 50 * 1000;  // a helper's, for the next part of a copy or a sum
// For so long the worker of a group's collectives leaves a small one to the thread that issued it.
constexpr int64_t kGrace = 300 * 1000;
// For so long a thread that asks to be told of a small one's end (`watch`) first waits for its peers, to carry it out
// itself: less than waking the worker takes.
constexpr int64_t kHardly = 5 * 1000;
// Without a submit of a small one for so long it looks no more. A look costs a program that computes up to 40 us on a
// virtual machine, as a wake-up does, and most small collectives come alone.
constexpr int64_t kLinger = 1000 * 1000;
// Without any submit for so long it is given back: a thread that is lent anew takes a third longer to come than one
// that sleeps here.
constexpr int64_t kKeep = 10 * 1000 * 1000;
// The helper of a group's messages leaves a new request so long to its issuer, who will most likely wait for it; and
// without a post for so long it is given back.
constexpr int64_t kMessagesTick = 500 * 1000, kMessagesKeep = 50 * 1000 * 1000;
constexpr int64_t kThread = 1000 * 1000 * 1000;  // one that is lent to nobody, before it ends
}  // namespace idle

}  // namespace c10d_custom
