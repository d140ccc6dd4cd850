// The least that an all_reduce by two ranks on one host can take whose tensors are not in shared memory: two processes,
// a core each, that agree on nothing, look after nobody and wait by spinning. Timed is what copies and sums take,
// alone.
//
//   g++ -O3 -march=native -o two-ranks 2026-11-27-two-ranks.cpp && ./two-ranks BYTES ROUNDS BLOCK
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

struct alignas(64) Counter {
  std::atomic<long> value;
};

struct Shared {
  Counter counters[2][4];
};

int me = 0;
Shared* shared;
char *ring[2], *in, *out, *other;
long told[4];

double now() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void tell(int which) { shared->counters[me][which].value.store(++told[which], std::memory_order_release); }
void await(int which, long value) {
  while (shared->counters[1 - me][which].value.load(std::memory_order_acquire) < value) {
  }
}
void meet() { tell(0), await(0, told[0]); }

void sum(char* to, const char* a, const char* b, size_t bytes) {
  auto* t = reinterpret_cast<float*>(to);
  auto *x = reinterpret_cast<const float*>(a), *y = reinterpret_cast<const float*>(b);
  for (size_t i = 0; i < bytes / 4; ++i) t[i] = x[i] + y[i];
}

void copies(size_t bytes, size_t) { memcpy(other, in, bytes); }

void whole(size_t bytes, size_t block) {
  const long before = told[1];
  for (size_t at = 0; at < bytes; at += block) memcpy(ring[me] + at, in + at, block), tell(1);
  for (size_t at = 0; at < bytes; at += block) {
    await(1, before + long(at / block) + 1);
    sum(out + at, in + at, ring[1 - me] + at, block);
  }
}

// Each sums one half, and gives the other rank the result.
void halves(size_t bytes, size_t block) {
  const size_t half = bytes / 2, mine = me * half, theirs = half - mine;
  const long given = told[2], summed = told[3];
  for (size_t at = 0; at < half; at += block) memcpy(ring[me] + theirs + at, in + theirs + at, block), tell(2);
  for (size_t at = 0; at < half; at += block) {
    await(2, given + long(at / block) + 1);
    sum(out + mine + at, in + mine + at, ring[1 - me] + mine + at, block);
    memcpy(ring[me] + mine + at, out + mine + at, block), tell(3);
  }
  for (size_t at = 0; at < half; at += block) {
    await(3, summed + long(at / block) + 1);
    memcpy(out + theirs + at, ring[1 - me] + theirs + at, block);
  }
}

void there_already(size_t bytes, size_t) { sum(out, in, ring[1 - me], bytes); }

struct Way {
  const char* name;
  void (*run)(size_t, size_t);
  std::vector<double> times;
};

}  // namespace

int main(int, char** arguments) {
  const size_t bytes = atol(arguments[1]), block = atol(arguments[3]);
  const int rounds = atoi(arguments[2]);
  auto* memory =
      static_cast<char*>(mmap(nullptr, 4096 + 2 * bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  shared = reinterpret_cast<Shared*>(memory);
  for (int r = 0; r < 2; ++r) ring[r] = memory + 4096 + r * bytes;
  memset(ring[0], 0, 2 * bytes);
  if (fork() == 0) me = 1;
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(me, &core);
  sched_setaffinity(0, sizeof core, &core);
  for (char** buffer : {&in, &out, &other})
    *buffer = static_cast<char*>(aligned_alloc(4096, bytes)), memset(*buffer, 0, bytes);

  Way ways[] = {{"floor: a copy of private memory", copies, {}},
                {"all into shared memory, all summed by both", whole, {}},
                {"halves", halves, {}},
                {"the sums alone", there_already, {}}};
  for (int round = 0; round < rounds; ++round)
    for (Way& way : ways)
      for (int call = 0; call < 20; ++call) {
        meet();
        const double began = now();
        way.run(bytes, block);
        meet();
        if (call > 3) way.times.push_back(now() - began);
      }
  if (me) _exit(0);
  double floor = 0;
  for (Way& way : ways) {
    std::sort(way.times.begin(), way.times.end());
    const double median = way.times[way.times.size() / 2];
    if (!floor) floor = median;
    printf("%-45s %7.1f us  %.2f x the floor\n", way.name, median, median / floor);
  }
  wait(nullptr);
}
