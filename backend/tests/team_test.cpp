// A rank's threads: every byte of a job is done once, whoever sleeps meanwhile; reductions have the bits of one
// thread's; and collectives of ranks with several threads, which are threads of one process here, give what they must.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../shm/api.h"
#include "../shm/layout.h"
#include "../shm/team.h"
#include "one_mapping.h"
#include "require.h"

using namespace c10d_custom;

namespace {

constexpr uint64_t kLarge = 2 << 20;

// Not atomic: the sanitizer sees a byte that two threads do.
void shares_all(uint32_t threads, uint64_t jobs) {
  Team team;
  team.set_size(threads);
  team.begin(kLarge);
  std::vector<unsigned char> times(300000);
  const uint64_t sizes[] = {0, 1, 63, 64, 32767, 32768, 32769, 65537, 100000, 131072, 299999};
  for (uint64_t job = 0; job < jobs; ++job) {
    const uint64_t size = sizes[job % (sizeof sizes / sizeof *sizes)];
    std::fill(times.begin(), times.end(), 0);
    team.share(size, [&](uint64_t from, uint64_t to) {
      require(from % 64 == 0 && from <= to, "a part begins amid a line", from, to);
      for (uint64_t i = from; i < to; ++i) ++times[i];
    });
    for (uint64_t i = 0; i < times.size(); ++i) require(times[i] == (i < size), "done otherwise than once", size, i);
    if (job % 40 == 39) usleep(job % 80 == 39 ? 40 : 300);  // helpers about to sleep, helpers asleep
  }
}

// That others than the caller take parts at all, also once they have slept; the caller's own part waits for it.
void helps() {
  Team team;
  team.set_size(2);
  team.begin(kLarge);
  for (int job = 0; job < 4; ++job) {
    std::atomic<uint32_t> began{0};
    team.share(kLarge, [&](uint64_t, uint64_t) {
      ++began;
      for (int64_t until = now_ns() + 20ll * 1000 * 1000 * 1000; began < 2;) {
        require(now_ns() < until, "nobody helps", uint64_t(job), 0);
        sched_yield();
      }
    });
    usleep(1000);
  }
  team.begin(1000);  // a small call is its caller's alone
  uint32_t parts = 0;
  team.share(kLarge, [&](uint64_t, uint64_t) { ++parts; });
  require(parts == 1, "a small call is shared", parts, 1);
}

void same_bits(uint32_t threads) {
  Team team;
  team.set_size(threads);
  std::mt19937 random(threads);
  const struct {
    DType dtype;
    ReduceOp op;
    uint64_t item;
  } kinds[] = {
      {kFloat32, kSum, 4}, {kBfloat16, kSum, 2}, {kFloat16, kAvg, 2}, {kComplex128, kProduct, 16}, {kInt8, kMax, 1}};
  for (const auto& kind : kinds) {
    const uint64_t count = 70001;
    std::vector<std::vector<char>> in(3, std::vector<char>(count * kind.item));
    for (auto& each : in)
      for (uint64_t i = 0; i < each.size(); i += 2) {
        const uint32_t bits = 0x3c00 + random() % 0x600;  // as any of the floats a number near 1
        memcpy(&each[i], &bits, std::min<uint64_t>(2, each.size() - i));
      }
    const void* src[] = {in[0].data(), in[1].data(), in[2].data()};
    std::vector<char> alone(count * kind.item), shared(count * kind.item);
    const ReduceFn kernel = reduce_kernel(kind.dtype, kind.op);
    kernel(alone.data(), src, 3, count, nullptr);
    team.begin(kLarge);
    team.reduce(kernel, shared.data(), src, 3, count * kind.item, kind.item, nullptr);
    require(alone == shared, "other bits", kind.dtype, threads);
  }
}

// Values of rank r: r + i. Every operation that moves blocks, twice, with calls too small to be shared between.
void rank(c10d_handle* group, uint32_t me, uint32_t n) {
  const uint64_t each = 150001;
  auto call = [&](Op op, uint64_t count, std::vector<Span> in, std::vector<Span> out) {
    CallArgs a{};
    a.op = op, a.redop = kSum, a.dtype = kInt64, a.root = op == kBroadcast ? 0 : -1, a.count = count, a.item_bytes = 8;
    a.timeout_ns = 60ll * 1000 * 1000 * 1000;
    a.nin = uint32_t(in.size()), a.in = in.data(), a.nout = uint32_t(out.size()), a.out = out.data();
    require(c10d_run(group, &a) == kOk, "a call failed", op, me);
  };
  std::vector<int64_t> mine(each * n), got(each * n);
  auto parts = [&](std::vector<int64_t>& v) {
    std::vector<Span> spans;
    for (uint32_t r = 0; r < n; ++r) spans.push_back({v.data() + r * each, each * 8});
    return spans;
  };
  auto all = [&](std::vector<int64_t>& v) { return std::vector<Span>{{v.data(), v.size() * 8}}; };
  auto is = [&](Op op, uint64_t count, auto want) {
    for (uint64_t i = 0; i < count; ++i) require(got[i] == int64_t(want(i)), "a wrong element", op, i);
  };
  const uint64_t sum = n * (n - 1) / 2;
  for (int turn = 0; turn < 2; ++turn) {
    for (uint64_t i = 0; i < mine.size(); ++i) mine[i] = int64_t(me + i);
    call(kAllReduce, got.size(), all(mine), all(got));
    is(kAllReduce, got.size(), [&](uint64_t i) { return sum + n * i; });
    call(kReduceScatter, each, parts(mine), {{got.data(), each * 8}});
    is(kReduceScatter, each, [&](uint64_t i) { return sum + n * (me * each + i); });
    call(kBarrier, 0, {}, {});
    call(kAllGather, each, {{mine.data(), each * 8}}, parts(got));
    is(kAllGather, got.size(), [&](uint64_t i) { return i / each + i % each; });
    call(kAllToAll, kNever, parts(mine), parts(got));
    is(kAllToAll, got.size(), [&](uint64_t i) { return i / each + me * each + i % each; });
    got = mine;
    call(kBroadcast, got.size(), me ? std::vector<Span>{} : all(got), me ? all(got) : std::vector<Span>{});
    is(kBroadcast, got.size(), [&](uint64_t i) { return i; });
  }
}

void ranks(uint32_t n, uint32_t threads) {
  const Geometry geometry{n, 3, 65536 * n, 4096, 1024, 4, 0};
  uint64_t total;
  const int fd = c10d_segment_create(&geometry, &total);
  require(fd >= 0, "no segment", n, 0);
  std::vector<c10d_handle*> groups(n);
  for (uint32_t r = 0; r < n; ++r) {
    const int error = c10d_open(dup(fd), r, 20 * 1000, nullptr, &groups[r]);
    require(!error, "cannot open", r, uint64_t(error));
    c10d_set_threads(groups[r], threads);
  }
  close(fd);
  std::vector<std::thread> all;
  for (uint32_t r = 0; r < n; ++r) all.emplace_back([&, r] { rank(groups[r], r, n); });
  for (std::thread& each : all) each.join();
  for (c10d_handle* g : groups) c10d_close(g);
  for (c10d_handle* g : groups) c10d_free(g);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t jobs = argc > 1 ? 2 * strtoull(argv[1], nullptr, 10) : 400;
  for (uint32_t threads : {1u, 2u, 4u}) {
    shares_all(threads, jobs);
    same_bits(threads);
  }
  helps();
  for (uint32_t n : {2u, 3u})
    for (uint32_t threads : {2u, 4u}) ranks(n, threads);
  std::puts("team_test: ok");
}
