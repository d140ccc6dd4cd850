// How many cache lines move between ranks in a call, counted in the core itself and held to the model of
// scripts/bench/lines.py. What that expects is in access_count_expected.inc, which scripts/doc_tables.py generates;
// `access_count_test print` shows what is counted beside it.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../shm/api.h"
#include "../shm/layout.h"
#include "../shm/reduce.h"
#include "line_directory.h"
#include "one_mapping.h"
#include "require.h"

using namespace c10d_custom;

// No rank leaves its core, as where each has one: what it writes then is no part of a call (seat.h).
extern "C" int __wrap_sched_getaffinity(pid_t, size_t bytes, cpu_set_t* cpus) {
  CPU_ZERO_S(bytes, cpus);
  CPU_SET_S(0, bytes, cpus);
  return 0;
}

// A slow clock: a yield that takes long, on a machine with more ranks than cores, is no reason to sleep (waiting.h).
extern "C" int __real_clock_gettime(clockid_t, timespec*);
extern "C" int __wrap_clock_gettime(clockid_t clock, timespec* t) {
  const int failed = __real_clock_gettime(clock, t);
  const int64_t slow = (int64_t(t->tv_sec) * 1000000000 + t->tv_nsec) / 200;
  t->tv_sec = time_t(slow / 1000000000), t->tv_nsec = long(slow % 1000000000);
  return failed;
}

// The kernels are compiled without counting: what one reads is what it is told to.
static void sum(void* to, const void* const* from, unsigned sources, size_t count, const double*) {
  for (unsigned s = 0; s < sources; ++s) lines::reads(from[s], count * sizeof(int32_t));
  for (size_t i = 0; i < count; ++i) {
    uint32_t all = 0;
    for (unsigned s = 0; s < sources; ++s) all += static_cast<const uint32_t*>(from[s])[i];
    static_cast<uint32_t*>(to)[i] = all;
  }
  lines::writes(to, count * sizeof(int32_t));
}
extern "C" ReduceFn __wrap__ZN11c10d_custom13reduce_kernelEjj(uint32_t, uint32_t) { return sum; }

namespace {

struct Expected {
  uint32_t ranks;
  Op op;
  uint64_t bytes;  // of the largest buffer
  // Lines in a call, over all ranks: control at least and at most, for a rank looks at some once for several blocks;
  // data exactly.
  uint64_t control, control_most, data;
};
constexpr Expected kExpected[] = {
#include "access_count_expected.inc"
};

constexpr uint32_t kCalls = 4;  // slots and blocks are used by turns
constexpr int64_t kMinute = 60ll * 1000 * 1000 * 1000;

class Buffers {
 public:
  Buffers(const Expected& e, uint32_t me) : e_(e), me_(me), in_(e.bytes / 4 + 1), out_(in_.size()) {}

  void call(c10d_handle* group) {
    for (size_t i = 0; i < in_.size(); ++i) in_[i] = me_ + uint32_t(i);
    const uint64_t part = e_.bytes / e_.ranks;
    auto whole = [&](std::vector<uint32_t>& v, uint64_t bytes) { return std::vector<Span>{{v.data(), bytes}}; };
    auto parts = [&](std::vector<uint32_t>& v) {
      std::vector<Span> spans;
      for (uint32_t r = 0; r < e_.ranks; ++r) spans.push_back({reinterpret_cast<char*>(v.data()) + r * part, part});
      return spans;
    };
    std::vector<Span> in, out;
    CallArgs a{};
    a.op = e_.op, a.redop = kSum, a.dtype = kInt32, a.root = -1, a.item_bytes = 4, a.timeout_ns = kMinute;
    a.count = e_.bytes / 4;
    switch (e_.op) {
      case kAllReduce: in = whole(in_, e_.bytes), out = whole(out_, e_.bytes); break;
      case kAllGather: in = whole(in_, part), out = parts(out_); break;
      case kReduceScatter: in = parts(in_), out = whole(out_, part); break;
      case kAllToAll: in = parts(in_), out = parts(out_), a.count = kNever; break;
      default: a.count = 0;
    }
    a.nin = uint32_t(in.size()), a.in = in.data(), a.nout = uint32_t(out.size()), a.out = out.data();
    const int status = c10d_run(group, &a);
    require(!status, "a call failed", uint64_t(status), 0);
    if (e_.op == kAllReduce)
      for (uint64_t i = 0; i < e_.bytes / 4; ++i) {
        const uint32_t want = e_.ranks * (e_.ranks - 1) / 2 + e_.ranks * uint32_t(i);
        require(out_[i] == want, "a wrong element", out_[i], want);
      }
  }

 private:
  const Expected& e_;
  const uint32_t me_;
  std::vector<uint32_t> in_, out_;
};

struct Counted {
  uint64_t control = 0, data = 0;
};

Counted count(const Expected& e) {
  Geometry geometry{e.ranks, 8, 128 << 10, 16 << 10, 32 << 10, 4, 0, 0};
  geometry.fan_in = e.ranks >= kManyRanks ? 8 : 0, geometry.two_steps_bytes = e.ranks > 3 ? 4096 : 0;
  const Layout layout(geometry);
  uint64_t total;
  const int fd = c10d_segment_create(&geometry, &total);
  require(fd >= 0, "no segment", uint64_t(-fd), 0);
  std::vector<c10d_handle*> groups(e.ranks);
  for (uint32_t r = 0; r < e.ranks; ++r) {
    const int error = c10d_open(dup(fd), r, kMinute, nullptr, &groups[r]);
    require(!error, "cannot open", uint64_t(error), 0);
  }
  close(fd);
  const auto* base = static_cast<const char*>(c10d_call_slots(groups[0])) - layout.call_slots;
  lines::directory.watch(base, layout.pairs, e.ranks, [layout](uint64_t at) {
    if (at >= layout.ctl && at < layout.has_cells) {
      const uint64_t field = (at - layout.ctl) % layout.ctl_bytes;
      const uint64_t seats = offsetof(RankCtl, seat);  // who looks at them waits
      return field >= seats && field < seats + kLine ? lines::kWaiting : lines::kControl;
    }
    if (at < layout.small) return lines::kControl;
    const bool flow =
        at >= layout.flows && (at - layout.flows) % (layout.flow_bytes + layout.pair_rings_bytes) < layout.flow_bytes;
    return flow ? lines::kControl : lines::kData;
  });
  pthread_barrier_t all;
  pthread_barrier_init(&all, nullptr, e.ranks);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < e.ranks; ++r)
    threads.emplace_back([&, r] {
      Buffers buffers(e, r);
      lines::rank = int(r);
      // As many before as it takes to have been everywhere.
      for (uint32_t call = 0; call < 4 * kCalls; ++call) buffers.call(groups[r]);
      if (pthread_barrier_wait(&all) == PTHREAD_BARRIER_SERIAL_THREAD) lines::directory.count(true);
      pthread_barrier_wait(&all);
      for (uint32_t call = 0; call < kCalls; ++call) buffers.call(groups[r]);
      pthread_barrier_wait(&all);
      lines::rank = -1;
    });
  for (std::thread& each : threads) each.join();
  lines::directory.count(false);
  Counted counted;
  for (const uint64_t moved : lines::directory.moved(lines::kControl)) counted.control += moved;
  for (const uint64_t moved : lines::directory.moved(lines::kData)) counted.data += moved;
  lines::directory.forget();
  pthread_barrier_destroy(&all);
  for (c10d_handle* g : groups) c10d_close(g);
  for (c10d_handle* g : groups) c10d_free(g);
  return counted;
}

}  // namespace

int main(int argc, char** argv) {
  const bool prints = argc > 1 && !strcmp(argv[1], "print");
  for (const Expected& e : kExpected) {
    const Counted counted = count(e);
    if (prints) {
      std::printf("%2u ranks, operation %u, %8lu bytes: control %8.2f (%lu to %lu), data %8.2f (%lu)\n", e.ranks, e.op,
                  (unsigned long)e.bytes, double(counted.control) / kCalls, (unsigned long)e.control,
                  (unsigned long)e.control_most, double(counted.data) / kCalls, (unsigned long)e.data);
      std::fflush(stdout);
      continue;
    }
    require(counted.data == kCalls * e.data, "lines of data", counted.data, kCalls * e.data);
    require(counted.control >= kCalls * e.control, "lines of control", counted.control, kCalls * e.control);
    require(counted.control <= kCalls * e.control_most, "lines of control", counted.control, kCalls * e.control_most);
  }
  std::puts("access_count_test: ok");
}
