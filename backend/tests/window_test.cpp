// Windows (shm/window.h), under ranks that are threads of one process and share one mapping of each arena, so that
// ThreadSanitizer sees a put that its signal does not order: with a relaxed store, or load, of Signal::value it reports
// the reads of `program`.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../shm/api.h"
#include "../shm/layout.h"
#include "../shm/reduce.h"
#include "one_mapping.h"
#include "require.h"

using namespace c10d_custom;

namespace {

constexpr int64_t kSecond = 1000 * 1000 * 1000, kMs = 1000 * 1000;
constexpr uint64_t kItems = 20000;  // more than two of a put's blocks

void meet(c10d_handle* g, uint32_t rank) {
  CallArgs a{};
  a.op = kBarrier, a.root = -1, a.item_bytes = 1, a.timeout_ns = 60 * kSecond;
  require(c10d_run(g, &a) == kOk, "barrier", rank, 0);
}

// What all ranks have registered; each writes its own.
struct World {
  std::vector<c10d_handle*> groups;
  std::vector<WindowPart> parts;

  explicit World(uint32_t n) : groups(n), parts(n) {
    const Geometry geometry{n, 3, 4096, 4096, 1024, 4, 0, 8 << 20};
    uint64_t total;
    const int fd = c10d_segment_create(&geometry, &total);
    for (uint32_t r = 0; r < n; ++r) c10d_open(dup(fd), r, 20 * 1000, nullptr, &groups[r]);
    close(fd);
  }
  ~World() {
    for (c10d_handle* g : groups) c10d_free(g);
  }
  template <class Program>
  void run(Program program) {
    std::vector<std::thread> ranks;
    for (uint32_t r = 0; r < groups.size(); ++r) ranks.emplace_back([&, r] { program(*this, r); });
    for (auto& t : ranks) t.join();
  }
};

// One rank's window, and its own memory.
struct Registered {
  c10d_handle* const group;
  c10d_arena *arena = nullptr, *signals_arena = nullptr;
  int64_t* data;
  void* signals;
  c10d_window* window;

  Registered(World& w, uint32_t me) : group(w.groups[me]) {
    const uint32_t n = uint32_t(w.groups.size());
    int error = 0;
    data = static_cast<int64_t*>(c10d_take(group, 8 * kItems, 0, &arena, &error));
    signals = c10d_take(group, c10d_clear_signals(nullptr, n), 0, &signals_arena, &error);
    require(data && signals, "no memory", me, uint64_t(error));
    c10d_clear_signals(signals, n);
    w.parts[me] = {c10d_place(group, data, 8 * kItems), kItems,
                   c10d_place(group, signals, c10d_clear_signals(nullptr, n)), kInt64, 8};
    meet(group, me);
    window = c10d_window_open(group, w.parts.data());
    require(window, "no window", me, 0);
  }
  Registered(const Registered&) = delete;
  ~Registered() {
    meet(group, 0);
    c10d_window_free(window);
    c10d_give_back(arena, data);
    c10d_give_back(signals_arena, signals);
  }
};

// A ring: each step puts into the next rank's memory, which reads it and says that it may be written to again.
void program(World& w, uint32_t me, uint64_t steps) {
  const Registered own(w, me);
  const uint32_t n = uint32_t(w.groups.size()), next = (me + 1) % n, before = (me + n - 1) % n;
  std::vector<int64_t> mine(kItems);
  for (uint64_t step = 1; step <= steps; ++step) {
    const uint64_t count = step % 3 == 0 ? kItems - 7 : 1 + step % 5, offset = step % 7;
    for (uint64_t i = 0; i < count; ++i) mine[i] = int64_t(me * 1000003 + step * 101 + i);
    require(c10d_window_put(own.window, next, kInt64, mine.data(), count, offset) == kOk, "put", me, step);
    require(c10d_window_signal(own.window, next) == kOk, "signal", me, step);
    require(c10d_window_wait(own.window, before, 60 * kSecond) == kOk, "wait", me, step);
    for (uint64_t i = 0; i < count; ++i)
      require(own.data[offset + i] == int64_t(before * 1000003 + step * 101 + i), "another's data", me, step);
    require(c10d_window_signal(own.window, before) == kOk, "signal back", me, step);
    require(c10d_window_wait(own.window, next, 60 * kSecond) == kOk, "wait to put again", me, step);
  }
}

// Numbers of signals: each is waited for once, in the order of the claims; a wait that failed has used up none.
void numbers(World& w, uint32_t me) {
  const Registered own(w, me);
  if (me == 0) {
    for (int i = 0; i < 3; ++i) {
      meet(own.group, me);
      c10d_window_signal(own.window, 1);
    }
    meet(own.group, me);
  } else {
    require(c10d_window_wait(own.window, 0, kMs) == kTimeout, "nobody has signalled", me, 0);
    const uint64_t first = c10d_window_claim(own.window, 0), second = c10d_window_claim(own.window, 0);
    require(first == 1 && second == 2, "the numbers", me, first);
    meet(own.group, me);
    require(c10d_window_await(own.window, 0, first, 60 * kSecond) == kOk, "the first", me, 1);
    require(c10d_window_await(own.window, 0, second, kMs) == kTimeout, "the second is not here", me, 1);
    c10d_window_give_back(own.window, 0, second);
    require(c10d_window_claim(own.window, 0) == second, "it was given back", me, 1);
    const uint64_t third = c10d_window_claim(own.window, 0);
    meet(own.group, me);
    meet(own.group, me);
    require(c10d_window_await(own.window, 0, third, 60 * kSecond) == kOk, "the third", me, third);
    require(c10d_window_await(own.window, 0, second, 0) == kOk, "the second is here, too", me, second);
    meet(own.group, me);
  }
  require(c10d_window_put(own.window, 0, kInt64, own.data, 2, kItems - 1) == kUsage, "beyond the end", me, 0);
  require(c10d_window_put(own.window, 0, kInt64, own.data, 1, kNever) == kUsage, "far beyond the end", me, 0);
  require(c10d_window_put(own.window, 0, kInt32, own.data, 1, 0) == kUsage, "another dtype", me, 0);
  require(c10d_window_put(own.window, 2, kInt64, own.data, 1, 0) == kUsage, "no such rank", me, 0);
  require(c10d_window_signal(own.window, 2) == kUsage && c10d_window_wait(own.window, 2, 0) == kUsage, "none", me, 0);
}

// Several threads of a rank wait for one peer, and several of that peer put, all at once, and signal: each wait gets
// one signal.
void threads(World& w, uint32_t me) {
  const Registered own(w, me);
  constexpr uint64_t kThreads = 4, kEach = 50, kPart = kItems / kThreads;
  std::vector<std::thread> all;
  for (uint64_t t = 0; t < kThreads; ++t)
    all.emplace_back([&, t] {
      const std::vector<int64_t> mine(kPart, int64_t(t + 1));
      for (uint64_t i = 0; i < kEach; ++i) {
        if (!me) c10d_window_put(own.window, 1, kInt64, mine.data(), kPart, t * kPart);
        require((me ? c10d_window_wait(own.window, 0, 60 * kSecond) : c10d_window_signal(own.window, 1)) == kOk,
                "signals of threads", me, i);
      }
    });
  for (auto& t : all) t.join();
  for (uint64_t i = 0; me && i < kItems; ++i) require(own.data[i] == int64_t(i / kPart + 1), "puts of threads", me, i);
  // What is put may lie in the window itself, both ways.
  for (uint64_t i = 0; i < kItems; ++i) own.data[i] = int64_t(i);
  c10d_window_put(own.window, me, kInt64, own.data, kItems - 1, 1);
  for (uint64_t i = 1; i < kItems; ++i) require(own.data[i] == int64_t(i - 1), "one up", me, i);
  c10d_window_put(own.window, me, kInt64, own.data + 1, kItems - 1, 0);
  for (uint64_t i = 0; i < kItems - 1; ++i) require(own.data[i] == int64_t(i), "one down", me, i);
  meet(own.group, me);
  require(!me || c10d_window_wait(own.window, 0, 0) == kTimeout, "one too many", me, 0);
}

// A wait ends when the peer leaves, and calls on a closed group do nothing.
void leaving() {
  World w(2);
  std::vector<c10d_window*> windows(2);
  w.run([&](World& world, uint32_t me) {
    const Registered own(world, me);
    windows[me] = c10d_window_open(own.group, world.parts.data());
  });
  std::thread waits([&] { require(c10d_window_wait(windows[0], 1, 60 * kSecond) == kPeerLost, "it has left", 0, 0); });
  c10d_close(w.groups[1]);
  waits.join();
  require(c10d_window_signal(windows[1], 0) == kAborted, "a closed group", 1, 0);
  require(c10d_window_wait(windows[1], 0, 60 * kSecond) == kAborted, "a closed group", 1, 0);
  for (c10d_window* each : windows) c10d_window_free(each);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t steps = argc > 1 ? strtoull(argv[1], nullptr, 10) : 500;
  for (uint32_t n : {2u, 3u}) World(n).run([&](World& w, uint32_t me) { program(w, me, steps); });
  World(2).run(numbers);
  World(2).run(threads);
  leaving();
  std::puts("window_test: ok");
}
