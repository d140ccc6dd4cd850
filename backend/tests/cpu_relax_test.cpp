// Waits for a cache line, in each way that this processor has and in none: they end when it is written, or when their
// time is over, whatever comes.
#include "../shm/cpu_relax.h"
#include "require.h"

#include <cstdio>
#include <cstdlib>
#include <thread>

using namespace c10d_custom;

namespace {

struct alignas(128) Line {
  std::atomic<uint64_t> value{0};
};

constexpr int64_t kLong = 60ll * 1000 * 1000 * 1000;
constexpr uint32_t kCycles = 2000;

// Two threads that answer each other, each on a line of its own.
void answers(Relaxing how, uint64_t turns) {
  Line lines[2];
  const int64_t until = now_ns() + kLong;
  auto play = [&](int me) {
    for (uint64_t turn = 1; turn <= turns; ++turn) {
      if (me) lines[1].value.store(turn, std::memory_order_release);
      const std::atomic<uint64_t>& other = lines[1 - me].value;
      while (!relax_until(&other, kCycles, [&] { return other.load(std::memory_order_acquire) >= turn; }, how)) {
        require(now_ns() < until, "an answer is not seen", turn);
        sched_yield();
      }
      if (!me) lines[0].value.store(turn, std::memory_order_release);
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
}

// Nobody writes: it ends all the same; and it looks before it waits and after.
void ends(Relaxing how) {
  Line line;
  for (const uint32_t cycles : {0u, 1u, kCycles, 1000000u}) {
    int looks = 0;
    require(!relax_until(&line.value, cycles, [&] { return ++looks, false; }, how), "nothing came");
    require(looks == (how == Relaxing::kPause ? 2 : 3), "looks", uint64_t(looks));
    looks = 0;
    require(relax_until(&line.value, cycles, [&] { return ++looks, true; }, how), "it was there");
    require(looks == 1, "looks", uint64_t(looks));
  }
}

// What is written once the line is watched ends the wait, or is seen before it.
void written_meanwhile(Relaxing how) {
  if (how == Relaxing::kPause) return;
  Line line;
  int looks = 0;
  auto done = [&] {
    if (++looks == 2) line.value.store(1, std::memory_order_seq_cst);  // by this very core: seen at once
    return line.value.load(std::memory_order_acquire) == 1;
  };
  require(relax_until(&line.value, UINT32_MAX, done, how), "seen before it waits");
  require(looks == 2, "looks", uint64_t(looks));
}

void all(Relaxing how, uint64_t turns) {
  for (const bool cool : {false, true}) {
    stay_cool(cool);
    answers(how, turns);
    ends(how);
    written_meanwhile(how);
  }
  stay_cool(false);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t turns = argc > 1 ? 20 * strtoull(argv[1], nullptr, 10) : 2000;
  const char* const names[] = {"a pause", "UMWAIT", "MWAITX", "WFE", "WFET"};
  all(Relaxing::kPause, turns);
  if (relaxing() != Relaxing::kPause) all(relaxing(), turns);
  std::printf("cpu_relax_test: ok, by %s\n", names[int(relaxing())]);
}
