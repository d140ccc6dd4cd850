// Messages under ranks that are threads of one process, step by step: what is taken back, what nobody receives, what is
// asked of a peer that is long in coming; and random programs in which messages are taken back, against a model.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "../shm/api.h"
#include "../shm/layout.h"
#include "../shm/reduce.h"
#include "one_mapping.h"
#include "require.h"
#include "tickets.h"

using namespace c10d_custom;

static std::atomic<long> lock_queries{0};

extern "C" {
int __real_fcntl(int, int, ...);
int __wrap_fcntl(int fd, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* const argument = va_arg(rest, void*);
  va_end(rest);
  lock_queries += command == F_GETLK;
  return __real_fcntl(fd, command, argument);
}
}

namespace {

constexpr int64_t kSecond = 1000 * 1000 * 1000;
constexpr uint64_t kLong = 3000, kShort = 100;  // bytes
// A ring of 4 cells of 1 KiB: 8 times that is the room of a pair.
constexpr uint64_t kCells = 4, kCellBytes = 1024, kRoom = 8 * kCells * (64 + kCellBytes);

struct Message {
  std::vector<uint8_t> bytes;
  c10d_handle* group;
  c10d_ticket* ticket = nullptr;
  Failure failure{};

  Message(c10d_handle* g, bool receives, int32_t peer, int64_t tag, uint64_t size, uint8_t what, int64_t timeout)
      : bytes(size, what), group(g) {
    const MessageArgs a{receives, kUint8, peer, 0, tag, {bytes.data(), size}, timeout};
    ticket = c10d_post(g, &a);
  }
  ~Message() { c10d_release(ticket); }
  bool done() const { return c10d_test(ticket) != kPending; }
  Status end(int64_t within = 20 * kSecond) { return Status(c10d_wait(group, ticket, within, 0, &failure)); }
};
using Posted = std::unique_ptr<Message>;

struct World {
  c10d_handle* g[3];
  uint32_t n;

  explicit World(uint32_t ranks = 2) : n(ranks) {
    const Geometry geometry{n, 3, 4096, 4096, uint32_t(kCellBytes), uint32_t(kCells), 0};
    uint64_t total;
    const int fd = c10d_segment_create(&geometry, &total);
    for (uint32_t r = 0; r < n; ++r) require(!c10d_open(dup(fd), r, 0, nullptr, &g[r]), "cannot open");
    close(fd);
  }
  ~World() {
    for (uint32_t r = 0; r < n; ++r) c10d_close(g[r]);
    for (uint32_t r = 0; r < n; ++r) c10d_free(g[r]);
  }
  Posted send(uint32_t from, int32_t to, uint64_t size, uint8_t what, int64_t tag = 0, int64_t timeout = 60 * kSecond) {
    return std::make_unique<Message>(g[from], false, to, tag, size, what, timeout);
  }
  Posted receive(uint32_t at, int32_t from, uint64_t size, int64_t tag = 0, int64_t timeout = 60 * kSecond) {
    return std::make_unique<Message>(g[at], true, from, tag, size, 0, timeout);
  }
  // Ends what is under way, so that its memory may go.
  void leave() {
    for (uint32_t r = 0; r < n; ++r) c10d_leave(g[r]);
  }
  // Lets a rank take in what has come, and answer.
  void turn(uint32_t r) { c10d_probe(g[r], 99); }
};

// What `r` has received: the value of all its bytes.
uint8_t got(Message& r) {
  require(r.end() == kOk, "a receive failed", r.failure.status);
  for (uint8_t b : r.bytes) require(b == r.bytes[0], "torn");
  return r.bytes[0];
}

// m1 is taken back after its receive was granted and so is m2's; m3 comes later. Neither the helpers nor a wait may
// move m1's bytes before: the sender does not look between.
void taken_back_after_the_grant(bool any_source) {
  for (int attempt = 0, tried = 0; tried < 20; ++attempt) {
    require(attempt < 5000, "never taken back in time");
    World w;
    const int32_t from = any_source ? -1 : 0;
    Posted r1 = w.receive(1, from, kLong), r2 = w.receive(1, from, kLong), r3 = w.receive(1, from, kLong, 5);
    Posted m1 = w.send(0, 1, kLong, 1), m2 = w.send(0, 1, kLong, 2), other = w.send(0, 1, kLong, 9, 5);
    w.turn(1);  // grants them all
    c10d_withdraw(w.g[0], m1->ticket);
    if (m1->end() == kOk || c10d_test(m2->ticket) == kAborted) {  // a helper was faster
      w.leave();
      continue;
    }
    ++tried;
    Posted m3 = w.send(0, 1, kLong, 3);
    require(got(*r1) == 2 && got(*r2) == 3 && got(*r3) == 9, "out of order", got(*r1));
    require(m2->end() == kOk && m3->end() == kOk, "a send failed");
  }
}

// The one after it does not fit the receive that it now meets: both are told.
void the_next_does_not_fit() {
  for (int attempt = 0, tried = 0; tried < 20; ++attempt) {
    require(attempt < 5000, "never taken back in time");
    World w;
    Posted r1 = w.receive(1, 0, 3 * kLong), r2 = w.receive(1, 0, kLong);
    Posted m1 = w.send(0, 1, 3 * kLong, 1), m2 = w.send(0, 1, kLong, 2);
    w.turn(1);
    c10d_withdraw(w.g[0], m1->ticket);
    if (m1->end() == kOk || m2->end(0) == kAborted) {
      w.leave();
      continue;
    }
    ++tried;
    require(r1->end() == kMismatch && r1->failure.expected == 3 * kLong && r1->failure.actual == kLong, "no mismatch");
    const Status told = m2->end();  // it may have gone before
    require(told == kMismatch || told == kOk, "the sender of what does not fit");
    Posted m3 = w.send(0, 1, kLong, 3);
    require(got(*r2) == 3, "after a message that did not fit");
  }
}

// A short message has overtaken what is taken back: the receive that it would have met is told.
void overtaken_by_a_short_one() {
  for (int attempt = 0, tried = 0; tried < 20; ++attempt) {
    require(attempt < 5000, "never taken back in time");
    World w;
    Posted r1 = w.receive(1, 0, kLong), r2 = w.receive(1, 0, kShort);
    Posted m1 = w.send(0, 1, kLong, 1), m2 = w.send(0, 1, kShort, 2);
    w.turn(1);
    c10d_withdraw(w.g[0], m1->ticket);
    Failure f{};
    if (m1->end() == kOk || c10d_health(w.g[0], kNever, &f)) {  // some bytes had moved
      w.leave();
      continue;
    }
    ++tried;
    require(got(*r2) == 2, "the short one");
    require(r1->end() == kMismatch && r1->failure.actual == kShort, "no mismatch");
  }
}

// Short messages that nobody receives: so many are taken in, and the others wait at their sender, while what goes by
// another tag, or comes back, is not held up; then all arrive, in order.
void room() {
  World w;
  constexpr uint64_t kMany = 2000, kFit = kRoom / (64 + kShort);
  static_assert(kFit < kMany / 2);
  std::vector<Posted> sends;
  for (uint64_t i = 0; i < kMany; ++i) {
    sends.push_back(w.send(0, 1, kShort, uint8_t(i % 251)));
    w.turn(1);
  }
  const auto over = [&] {
    uint64_t count = 0;
    for (const Posted& m : sends) count += m->done();
    return count;
  };
  require(over() == kFit, "how many short messages are taken in", over());
  Posted other = w.send(0, 1, kShort, 77, 5), others = w.receive(1, 0, kShort, 5);
  require(got(*others) == 77 && other->end() == kOk, "held up by what nobody receives");
  Posted back = w.send(1, 0, kShort, 78), backs = w.receive(0, 1, kShort);
  require(got(*backs) == 78, "the other way");
  for (uint64_t i = 0; i < kMany; ++i) {
    Posted r = w.receive(1, 0, kShort);
    require(got(*r) == i % 251, "order", i);
  }
  for (Posted& m : sends) require(m->end() == kOk, "a send failed");
  Posted again = w.send(0, 1, kShort, 1);
  require(again->end() == kOk, "no room though all has been received");
}

// One that waits for room ends at its own deadline, and leaves its place to who comes after it.
void room_and_time() {
  World w;
  std::vector<Posted> sends;
  while (sends.empty() || sends.back()->done()) {
    require(sends.size() < 5000, "no limit to what nobody receives");
    sends.push_back(w.send(0, 1, kShort, uint8_t(sends.size() % 251), 0, kSecond / 5));
    w.turn(1);
    sends.back()->end(kSecond / 100);
  }
  Posted after = w.send(0, 1, kShort, 255);
  require(sends.back()->end() == kTimeout, "a send that nobody has room for");
  for (uint64_t i = 0; i + 1 < sends.size(); ++i) {
    Posted r = w.receive(1, 0, kShort);
    require(got(*r) == i % 251, "order", i);
  }
  Posted r = w.receive(1, 0, kShort);
  require(got(*r) == 255, "what comes after one that has ended");
}

// A rank that waits for another with many receives asks after it once a look.
void looks() {
  const Geometry geometry{2, 3, 4096, 4096, uint32_t(kCellBytes), uint32_t(kCells), 0};
  uint64_t total;
  const int fd = c10d_segment_create(&geometry, &total);
  int ready[2];
  require(!pipe(ready), "no pipe");
  const pid_t child = fork();
  if (!child) {
    c10d_handle* g;
    if (c10d_open(fd, 1, 0, nullptr, &g)) _exit(1);
    if (write(ready[1], "", 1) != 1) _exit(2);
    for (;;) pause();
  }
  char byte;
  require(read(ready[0], &byte, 1) == 1, "no peer");
  c10d_handle* g;
  require(!c10d_open(fd, 0, 0, nullptr, &g), "cannot open");
  std::vector<Posted> receives;
  constexpr uint64_t kMany = 3000;
  for (uint64_t i = 0; i < kMany; ++i)
    receives.push_back(std::make_unique<Message>(g, true, i % 3 ? 1 : -1, int64_t(i % 7), kShort, 0, 60 * kSecond));
  lock_queries = 0;
  require(receives[0]->end(kSecond / 4) == kPending, "nobody has sent");
  require(lock_queries > 0 && lock_queries < long(kMany / 10), "lock queries", uint64_t(lock_queries));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  for (Posted& r : receives) require(r->end() == kPeerLost && r->failure.peer == 1, "the loss of a peer");
  receives.clear();
  c10d_close(g), c10d_free(g);
}

// Sends and receives of two tags, in any order, some of them taken back before anybody can have moved them (the
// receiver has not looked since); what arrives is what is left, in order.
void random_programs(uint64_t seed, uint64_t steps) {
  std::mt19937_64 random(seed);
  World w;
  struct Sent {
    Posted message;
    uint8_t what;
  };
  std::map<int64_t, std::deque<uint8_t>> expected;  // by tag
  std::map<int64_t, std::deque<Posted>> receives;
  std::vector<Sent> sends;
  uint8_t next = 0;
  const auto check = [&](int64_t tag) {
    while (!receives[tag].empty() && !expected[tag].empty()) {
      require(got(*receives[tag].front()) == expected[tag].front(), "random program", seed);
      receives[tag].pop_front(), expected[tag].pop_front();
    }
  };
  for (uint64_t step = 0; step < steps; ++step) {
    const int64_t tag = int64_t(random() % 2);
    const uint64_t size = tag ? kLong : kShort;
    switch (random() % 6) {
      case 0:
      case 1: {
        const uint8_t what = ++next;
        sends.push_back({w.send(0, 1, size, what, tag), what});
        expected[tag].push_back(what);
        break;
      }
      case 2:
      case 3: receives[tag].push_back(w.receive(1, random() % 3 ? 0 : -1, size, tag)); break;
      case 4: {  // of a message that is new: nobody has granted it
        Posted m = w.send(0, 1, kLong, 0, 1);
        c10d_withdraw(w.g[0], m->ticket);
        require(m->end() != kPending, "taken back");
        // A helper of the receiver's may have been quick enough for the sender's to have moved it all.
        if (m->end() == kOk) expected[1].push_back(0);
        break;
      }
      default: check(tag);
    }
    Failure f{};
    if (c10d_health(w.g[0], kNever, &f)) return w.leave();  // some of its bytes had moved
  }
  for (int64_t tag : {0, 1}) {
    while (receives[tag].size() < expected[tag].size())
      receives[tag].push_back(w.receive(1, 0, tag ? kLong : kShort, tag));
    check(tag);
  }
  for (Sent& s : sends) require(s.message->end() == kOk, "a send failed");
  w.leave();
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t steps = argc > 1 ? strtoull(argv[1], nullptr, 10) : 300;
  looks();  // it forks: before there is a thread
  taken_back_after_the_grant(false);
  taken_back_after_the_grant(true);
  the_next_does_not_fit();
  overtaken_by_a_short_one();
  room();
  room_and_time();
  for (uint64_t seed = 1; seed <= 30; ++seed) random_programs(seed, steps);
  std::puts("messages_test: ok");
}
