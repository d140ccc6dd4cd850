// Collectives of tensors in arenas (shm/in_place.cpp), under ranks that are threads of one process and share one
// mapping of each arena, so that the sanitizers see who touches what: against sums computed directly, and counted, so
// that no other way can pass for this one.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../shm/api.h"
#include "../shm/layout.h"
#include "../shm/reduce.h"
#include "one_mapping.h"
#include "require.h"

using namespace c10d_custom;

namespace {

constexpr int64_t kSecond = 1000 * 1000 * 1000;
constexpr uint64_t kArena = 8 << 20;

int64_t value(uint32_t rank, uint64_t step, uint64_t i) { return int64_t(rank * 1000003 + step * 101 + i * 7); }

// Bytes in the group's arena, or on the heap.
class Memory {
 public:
  Memory(c10d_handle* g, uint64_t bytes, bool in_arena) : heap_(in_arena ? 0 : bytes + 1) {
    int error = 0;
    at_ = in_arena ? c10d_take(g, bytes + 1, 0, &arena_, &error) : heap_.data();
    require(at_, "no memory", 0, uint64_t(error));
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    if (arena_) c10d_give_back(arena_, at_);
  }
  // At an odd address, if so wished.
  char* at(bool odd) const { return static_cast<char*>(at_) + odd; }

 private:
  std::vector<char> heap_;
  c10d_arena* arena_ = nullptr;
  void* at_;
};

struct Rank {
  c10d_handle* group;
  const uint32_t me, n;

  uint64_t blocks_reduced() {
    PeerState s{};
    c10d_peer_state(group, me, 0, &s);
    return s.red;
  }

  void put(char* to, uint32_t rank, uint64_t step, uint64_t from, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      const int64_t v = value(rank, step, from + i);
      memcpy(to + 8 * i, &v, 8);
    }
  }

  template <class Expected>
  void check(const char* at, uint64_t count, const char* what, uint64_t step, Expected expected) {
    for (uint64_t i = 0; i < count; ++i) {
      int64_t v;
      memcpy(&v, at + 8 * i, 8);
      require(v == expected(i), what, me, step);
    }
  }

  void call(uint64_t step, Op op, uint64_t count, const std::vector<Span>& in, const std::vector<Span>& out) {
    CallArgs a{};
    a.op = op, a.redop = kSum, a.dtype = kInt64, a.root = -1, a.count = count, a.item_bytes = 8;
    a.timeout_ns = 60 * kSecond;
    a.nin = uint32_t(in.size()), a.in = in.data(), a.nout = uint32_t(out.size()), a.out = out.data();
    require(c10d_run(group, &a) == kOk, "failed", me, step);
  }

  int64_t sum(uint64_t step, uint64_t i) const {
    int64_t s = 0;
    for (uint32_t r = 0; r < n; ++r) s += value(r, step, i);
    return s;
  }

  // One collective; `mine`, `all`: whether the inputs of this rank, and of all, are in arenas.
  void step(uint64_t step, uint32_t kind, uint64_t count, bool mine, bool all) {
    const uint64_t bytes = 8 * count, before = blocks_reduced(), odd = (step + me) % 3 == 0;
    auto parts = [&](char* at) {
      std::vector<Span> s;
      for (uint32_t r = 0; r < n; ++r) s.push_back({at + r * bytes, bytes});
      return s;
    };
    if (kind == 0) {
      const Memory m(group, bytes, mine);
      put(m.at(odd), me, step, 0, count);
      const Span s{m.at(odd), bytes};
      call(step, kAllReduce, count, {s}, {s});
      check(m.at(odd), count, "all_reduce", step, [&](uint64_t i) { return sum(step, i); });
    } else if (kind == 1) {
      const Memory m(group, bytes, mine), out(group, n * bytes, step % 2);
      put(m.at(odd), me, step, 0, count);
      call(step, kAllGather, count, {{m.at(odd), bytes}}, parts(out.at(false)));
      check(out.at(false), n * count, "all_gather", step,
            [&](uint64_t i) { return value(uint32_t(i / count), step, i % count); });
    } else if (kind == 2) {  // its input is its own part of the output
      const Memory out(group, n * bytes, mine);
      put(out.at(odd) + me * bytes, me, step, 0, count);
      call(step, kAllGather, count, {{out.at(odd) + me * bytes, bytes}}, parts(out.at(odd)));
      check(out.at(odd), n * count, "all_gather in place", step,
            [&](uint64_t i) { return value(uint32_t(i / count), step, i % count); });
    } else {  // 4: its output is its own part of the input
      const Memory m(group, n * bytes, mine), other(group, bytes, step % 2);
      put(m.at(odd), me, step, 0, n * count);
      char* const out = kind == 3 ? other.at(odd) : m.at(odd) + me * bytes;
      call(step, kReduceScatter, count, parts(m.at(odd)), {{out, bytes}});
      check(out, count, "reduce_scatter", step, [&](uint64_t i) { return sum(step, me * count + i); });
    }
    const uint64_t blocks = blocks_reduced() - before;
    if (all && (kind == 0 || bytes >= n * 16384)) require(blocks == 1, "not in place", me, step);
    if (!all && bytes > 64 * 1024) require(blocks > 1, "in place, of what is not", me, step);
  }

  void program(uint64_t seed, uint64_t steps) {
    std::mt19937_64 shared(seed);  // the same on every rank
    for (uint64_t i = 0; i < steps; ++i) {
      const uint32_t kind = uint32_t(shared() % 5), ranks = uint32_t(shared());
      const uint64_t count = shared() % 3 ? 1000 + shared() % 2000 : 1000 + shared() % 30000;
      bool all = shared() % 3 != 0;
      const bool mine = all || (ranks >> me & 1);
      if (!all && !(~ranks & ((1u << n) - 1))) all = true;
      step(i, kind, count, mine, all);
    }
  }
};

struct World {
  std::vector<c10d_handle*> groups;

  explicit World(uint32_t n) : groups(n) {
    const Geometry geometry{n, 3, 4096, 4096, 1024, 4, 0, kArena};
    uint64_t total;
    const int fd = c10d_segment_create(&geometry, &total);
    for (uint32_t r = 0; r < n; ++r) c10d_open(dup(fd), r, 20 * 1000, nullptr, &groups[r]);
    close(fd);
  }
  ~World() {
    for (c10d_handle* g : groups) c10d_free(g);
  }
};

void programs(uint32_t n, uint64_t steps) {
  World w(n);
  std::vector<std::thread> ranks;
  for (uint32_t r = 0; r < n; ++r) ranks.emplace_back([&, r] { Rank{w.groups[r], r, n}.program(n, steps); });
  for (auto& t : ranks) t.join();
}

// A rank that waits in vain has its tensor to itself afterwards, though a peer may have seen where it is.
void late() {
  World w(2);
  const uint64_t count = 10000;
  c10d_arena* arena;
  int error = 0;
  void* const block = c10d_take(w.groups[0], 8 * count, 0, &arena, &error);
  const Span s{block, 8 * count};
  CallArgs a{kAllReduce, kSum, kInt64, -1, count, 8, 0, 0, 0, 0, kSecond / 50, 1, 1, &s, &s, nullptr};
  require(c10d_run(w.groups[0], &a) == kTimeout, "nobody came", 0, 0);
  // Where it was: the first block of the first arena.
  PeerState state{};
  c10d_peer_state(w.groups[0], 0, 1, &state);
  Fingerprint said;
  memcpy(&said, state.fingerprint, sizeof said);
  require(said.place == 1, "its place was not announced", 0, 0);
  memset(block, 5, 8 * count);
  require(c10d_run(w.groups[1], &a) == kBroken, "too late", 1, 0);
  c10d_leave(w.groups[0]);
  void* const none = c10d_take(w.groups[0], 8, 0, &arena, &error);
  require(none, "a group that has left, and is not closed, has its arena", 0, 0);
  c10d_give_back(arena, none);
  c10d_close(w.groups[0]);
  c10d_arena* other;
  require(!c10d_take(w.groups[0], 8, 0, &other, &error) && error == -kAborted, "memory of a closed group", 0, 0);
  require(static_cast<char*>(block)[80] == 5, "lost with the group", 0, 0);
  c10d_give_back(arena, block);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t steps = argc > 1 ? strtoull(argv[1], nullptr, 10) : 200;
  for (uint32_t n : {2u, 3u, 5u}) programs(n, steps);
  late();
  std::puts("in_place_test: ok");
}
