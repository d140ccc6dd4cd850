// Reductions over hosts (hosts/pipelined_reduce.cpp): each rank is a thread, each host a segment, and MPI a place for
// each two ranks where a message lies until the other takes it out of its sender's memory. Random sizes, cuts, roots
// and layouts, with ordinary collectives of the hosts between, against what the sums must be; then what ends a call
// early.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../shm/api.h"
#include "../hosts/pipelined_reduce.h"
#include "../shm/layout.h"
#include "../shm/reduce.h"
#include "one_mapping.h"
#include "require.h"

using namespace c10d_custom;

namespace {

constexpr int64_t kMs = 1000 * 1000;
constexpr uint32_t kSlots = 3;

struct Request;

struct Mailbox {
  std::mutex mutex;
  std::deque<Request*> sends;
};

struct Request {
  Mailbox* box;
  char* buffer;
  uint64_t bytes;
  bool sends;
  std::atomic<bool> active{false};
  Request(Mailbox* m, char* b, uint64_t n, bool s) : box(m), buffer(b), bytes(n), sends(s) {}
  Request(Request&& r) : Request(r.box, r.buffer, r.bytes, r.sends) {}
};

std::atomic<unsigned> starts{0};
FailureNews failure_news{-1, {0}};

int startall(int n, void* requests) {
  ++starts;
  for (Request* r = static_cast<Request*>(requests); n--; ++r) {
    require(!r->active, "a request was started twice", 0);
    r->active = true;
    if (!r->sends) continue;
    std::lock_guard<std::mutex> lock(r->box->mutex);
    r->box->sends.push_back(r);
  }
  return 0;
}

std::atomic<bool> fail_transfers{false};

int testall(int n, void* requests, int* done, void*) {
  if (fail_transfers) return 1;
  *done = 1;
  for (Request* r = static_cast<Request*>(requests); n--; ++r) {
    if (r->active && !r->sends) {
      std::lock_guard<std::mutex> lock(r->box->mutex);
      if (!r->box->sends.empty()) {
        Request* const from = r->box->sends.front();
        require(from->bytes == r->bytes, "a message of another length", 0);
        memcpy(r->buffer, from->buffer, r->bytes);
        r->box->sends.pop_front();
        r->active = false;
        from->active = false;
      }
    }
    if (r->active) *done = 0;
  }
  return 0;
}

uint64_t cut(uint64_t bytes, uint64_t parts, uint64_t p) { return std::min(bytes, (bytes + 63) / 64 * p / parts * 64); }

struct World {
  std::vector<uint32_t> widths;
  uint32_t carriers;
  std::vector<std::vector<c10d_handle*>> groups;  // host, local
  std::vector<std::map<std::pair<uint32_t, uint32_t>, Mailbox>>
      mail[2];  // of each phase, each carrier; from host, to host

  explicit World(std::vector<uint32_t> w) : widths(std::move(w)), carriers(widths[0]) {
    for (uint32_t n : widths) carriers = std::min(carriers, n);
    for (auto& phase : mail) {
      phase.resize(carriers);
      for (auto& carrier : phase)
        for (uint32_t a = 0; a < widths.size(); ++a)
          for (uint32_t z = 0; z < widths.size(); ++z) carrier[{a, z}];
    }
    for (uint32_t n : widths) {
      const Geometry geometry{n, 3, 4096, 4096, 1024, 4, 0};
      uint64_t total;
      const int fd = c10d_segment_create(&geometry, &total);
      require(fd >= 0, "no segment", 0);
      groups.emplace_back(n);
      for (uint32_t r = 0; r < n; ++r)
        require(!c10d_open(dup(fd), r, 20 * 1000, nullptr, &groups.back()[r]), "not opened", 0);
      close(fd);
    }
  }
  ~World() {
    for (auto& host : groups)
      for (c10d_handle* g : host) c10d_leave(g);
    for (auto& host : groups)
      for (c10d_handle* g : host) c10d_free(g);
  }
  uint32_t hosts() const { return uint32_t(widths.size()); }
  uint32_t first(uint32_t host) const {
    uint32_t sum = 0;
    for (uint32_t h = 0; h < host; ++h) sum += widths[h];
    return sum;
  }
  uint32_t size() const { return first(hosts()); }
};

int looks() { return 1; }

struct Rank {
  World& w;
  const uint32_t host, local;

  int64_t me() const { return w.first(host) + local; }
  c10d_handle* group() const { return w.groups[host][local]; }

  // root: (host, local), or {-1, -1}: an all_reduce.
  int reduce(int64_t* data, uint64_t count, uint64_t chunk, int32_t root_host, int32_t root_local, uint64_t step,
             int64_t timeout_ns = 60000 * kMs, int (*look)() = nullptr, uint32_t* end = nullptr) const {
    const uint64_t total = count * 8, chunks = (total + chunk - 1) / chunk;
    const uint32_t hosts = w.hosts();
    const bool rooted = root_host >= 0, keeps = !rooted || uint32_t(root_host) == host;
    struct Memory {
      std::vector<char> mine;
      std::vector<std::vector<char>> theirs;
      std::vector<char*> theirs_at;
      std::vector<Request> requests[2][2];
    };
    std::vector<std::unique_ptr<Memory>> memory;
    std::vector<PipelinedSlot> slots;
    const uint64_t most = (chunk + 63) / 64 * 64;
    for (uint32_t s = 0; s < kSlots && local < w.carriers; ++s) {
      memory.push_back(std::make_unique<Memory>());
      Memory& m = *memory.back();
      m.mine.resize(most);
      m.theirs.assign(hosts, std::vector<char>(most));
      PipelinedSlot slot{};
      slot.mine = m.mine.data();
      for (int last = 0; last < 2 && chunks; ++last) {
        const uint64_t size = last ? total - (chunks - 1) * chunk : std::min(chunk, total);
        const uint64_t part = cut(size, w.carriers, local + 1) - cut(size, w.carriers, local);
        auto ask = [&](int phase, uint32_t from, uint32_t to, char* at, uint64_t bytes) {
          if (bytes) m.requests[last][phase].emplace_back(&w.mail[phase][local][{from, to}], at, bytes, from == host);
        };
        for (uint32_t h = 0; h < hosts; ++h) {
          if (h == host) continue;
          const uint64_t own = cut(part, hosts, host), next = cut(part, hosts, host + 1);
          const uint64_t his = cut(part, hosts, h), end_his = cut(part, hosts, h + 1);
          if (hosts == 2) {
            if (keeps) ask(0, h, host, m.theirs[h].data(), part);
            if (!rooted || uint32_t(root_host) == h) ask(0, host, h, m.mine.data(), part);
            continue;
          }
          ask(0, h, host, m.theirs[h].data(), next - own);
          ask(0, host, h, m.mine.data() + his, end_his - his);
          if (keeps) ask(1, h, host, m.mine.data() + his, end_his - his);
          if (!rooted || uint32_t(root_host) == h) ask(1, host, h, m.mine.data() + own, next - own);
        }
        for (int phase = 0; phase < 2; ++phase)
          slot.phases[last][phase] = {m.requests[last][phase].data(), m.requests[last][phase].size()};
      }
      for (uint32_t h = 0; h < hosts; ++h) m.theirs_at.push_back(h == host ? nullptr : m.theirs[h].data());
      slot.theirs = m.theirs_at.data();
      slots.push_back(slot);
    }
    PipelinedReduce b{};
    b.startall = startall, b.testall = testall, b.look = look, b.later_ns = 100 * kMs;
    b.chunk = chunk, b.slots = slots.empty() || !count ? nullptr : slots.data(), b.nslots = kSlots,
    b.carriers = w.carriers;
    b.failure_news = &failure_news;
    b.hosts = hosts, b.own = host, b.op = kSum, b.keeps = keeps;
    Span span{data, total};
    CallArgs a{};
    a.op = rooted ? kReduce : kAllReduce, a.redop = kSum, a.dtype = kInt64, a.root = keeps ? root_local : -1,
    a.count = count;
    a.item_bytes = 8, a.number = step, a.timeout_ns = timeout_ns;
    a.nin = 1, a.in = &span, a.out = &span, a.pipelined = &b;
    a.nout = !rooted || (keeps && local == uint32_t(root_local));
    const int status = c10d_run(group(), &a);
    if (end) *end = b.end;
    return status;
  }

  void inside(uint64_t step, uint64_t count) const {
    std::vector<int64_t> mine(count, me() + 1), all(count * w.widths[host]);
    std::vector<Span> parts;
    for (uint32_t r = 0; r < w.widths[host]; ++r) parts.push_back({all.data() + r * count, count * 8});
    Span span{mine.data(), count * 8};
    CallArgs a{};
    a.op = step % 2 ? kAllReduce : kAllGather, a.redop = kSum, a.dtype = kInt64, a.root = -1, a.count = count,
    a.item_bytes = 8;
    a.timeout_ns = 60000 * kMs, a.nin = 1, a.in = &span, a.out = step % 2 ? &span : parts.data();
    a.nout = step % 2 ? 1 : w.widths[host];
    require(c10d_run(group(), &a) == kOk, "an ordinary collective failed", step);
    const int64_t from = w.first(host), n = w.widths[host];
    for (uint64_t i = 0; i < count; ++i)
      if (step % 2)
        require(mine[i] == n * (2 * from + n + 1) / 2, "an ordinary sum is wrong", step);
      else
        for (int64_t r = 0; r < n; ++r)
          require(all[r * count + i] == from + r + 1, "an ordinary all_gather is wrong", step);
  }
};

void program(const Rank& rank, uint64_t seed, uint64_t steps) {
  World& w = rank.w;
  std::mt19937_64 random(seed);  // the same on all ranks
  const int64_t world = w.size();
  for (uint64_t step = 1; step <= steps; ++step) {
    const uint64_t chunk = (1 + random() % 200) * 64, kind = random() % 4;
    const uint64_t count = random() % 8 ? random() % 6000 : 0;
    const uint32_t root_host = uint32_t(random() % w.hosts()), root_local = uint32_t(random() % w.widths[root_host]);
    if (kind == 3) {
      rank.inside(step, 1 + count);
      continue;
    }
    const bool rooted = kind == 2;
    const bool mine = !rooted || (root_host == rank.host && root_local == rank.local);
    std::vector<int64_t> data(count);
    for (uint64_t i = 0; i < count; ++i) data[i] = int64_t(step * 1000 + i) * (rank.me() + 1);
    require(rank.reduce(data.data(), count, chunk, rooted ? int32_t(root_host) : -1, rooted ? int32_t(root_local) : -1,
                        step) == kOk,
            "no success", step);
    for (uint64_t i = 0; i < count; ++i)
      require(data[i] == int64_t(step * 1000 + i) * (mine ? world * (world + 1) / 2 : rank.me() + 1), "a wrong sum",
              step);
  }
}

template <class Work>
void together(World& w, Work work) {
  std::vector<std::thread> threads;
  for (uint32_t h = 0; h < w.hosts(); ++h)
    for (uint32_t l = 0; l < w.widths[h]; ++l) threads.emplace_back([&w, h, l, &work] { work(Rank{w, h, l}); });
  for (std::thread& t : threads) t.join();
}

// Nothing is started while a rank may be gone; all goes on once it is known that none is.
void alarms() {
  {
    World w({2, 2});
    const unsigned before = starts;
    failure_news.kept = 1;
    together(w, [](const Rank& r) {
      std::vector<int64_t> data(5000);
      const int status = r.reduce(data.data(), data.size(), 4096, -1, -1, 1, 200 * kMs);
      require(status == kTimeout || status == kBroken, "a call ended without its transfers", 0);
    });
    require(starts == before, "a transfer was started amid an alarm", 0);
    failure_news.kept = 0;
  }
  for (const auto& widths : std::vector<std::vector<uint32_t>>{{2, 2}, {2, 1, 3}}) {
    World w(widths);
    std::atomic<bool> over{false};
    std::thread bell([&] {
      for (unsigned i = 0; !over; ++i) failure_news.kept = i % 2, std::this_thread::yield();
      failure_news.kept = 0;
    });
    together(w, [](const Rank& r) { program(r, 99, 20); });
    over = true;
    bell.join();
  }
}

// Host 1 never comes, or its transfers fail; a rank of host 0 goes away.
void endings() {
  constexpr uint64_t kCount = 5000;
  auto without_host_1 = [](PipelinedEnd expected, int64_t timeout_ns, int (*look)()) {
    World w({2, 2});
    together(w, [&](const Rank& r) {
      std::vector<int64_t> data(kCount);
      if (r.host) return;
      uint32_t end = 0;
      const int status = r.reduce(data.data(), kCount, 4096, -1, -1, 1, timeout_ns, look, &end);
      require(status == kAborted && end == expected, "a call ended for another reason", expected);
    });
  };
  without_host_1(kLate, 300 * kMs, nullptr);
  const unsigned before = starts;
  without_host_1(kLate, 99 * kMs, nullptr);  // late from the first: see later_ns
  require(starts == before, "a transfer was started after the deadline", 0);
  without_host_1(kLooked, 60000 * kMs, looks);
  fail_transfers = true;
  without_host_1(kTransfer, 60000 * kMs, nullptr);
  fail_transfers = false;
  {
    World w({3, 1});
    together(w, [](const Rank& r) {
      std::vector<int64_t> data(kCount);
      if (r.host) return;
      if (r.local == 2) return c10d_leave(r.group());
      const int status = r.reduce(data.data(), kCount, 4096, -1, -1, 1);
      Failure f;
      c10d_last_failure(&f);
      require((status == kPeerLost || (status == kBroken && f.cause == kPeerLost)) && f.peer == 2,
              "a rank that left went unnoticed", 0);
    });
  }
  {
    World w({2, 1});
    together(w, [](const Rank& r) {
      std::vector<int64_t> data(kCount);
      if (r.host) return;
      const int status = r.reduce(data.data(), kCount - r.local, 4096, -1, -1, 1);
      Failure f;
      c10d_last_failure(&f);
      require(status == kMismatch || (status == kBroken && f.cause == kMismatch), "a mismatch went unnoticed", 0);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t steps = argc > 1 ? strtoull(argv[1], nullptr, 10) : 60;
  const std::vector<std::vector<uint32_t>> layouts = {{2, 2}, {3, 1},    {1, 1},    {1, 4},
                                                      {3, 3}, {2, 1, 3}, {2, 2, 2}, {1, 1, 1, 1}};
  uint64_t seed = 1;
  for (const auto& widths : layouts) {
    World w(widths);
    ++seed;
    together(w, [&](const Rank& r) { program(r, seed, steps); });
  }
  endings();
  alarms();
  std::puts("pipelined_reduce_test: ok");
}
