// The engines under ranks that are threads of one process, so that the sanitizers see both sides of
// every exchange: random programs of collectives and messages, against sums computed directly.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../shm/algorithm.h"
#include "../shm/api.h"
#include "../shm/layout.h"
#include "../shm/reduce.h"
#include "../shm/topology.h"
#include "../shm/waiting.h"
#include "one_mapping.h"
#include "require.h"
#include "tickets.h"

using namespace c10d_custom;

namespace {

using Values = std::vector<int64_t>;
constexpr int64_t kSecond = 1000 * 1000 * 1000;

Fingerprint said(const PeerState& state) {  // a copy: there it is not aligned as its type wants
  Fingerprint f;
  memcpy(&f, state.fingerprint, sizeof f);
  return f;
}

int64_t value(uint32_t rank, uint64_t step, uint64_t i) { return int64_t(rank * 1000003 + step * 101 + i * 7); }

Values input(uint32_t rank, uint64_t step, uint64_t n, uint64_t from = 0) {
  Values v(n);
  for (uint64_t i = 0; i < n; ++i) v[i] = value(rank, step, from + i);
  return v;
}

Span span(Values& v, uint64_t from, uint64_t n) { return {v.data() + from, n * sizeof(int64_t)}; }

struct Rank {
  c10d_handle* group;
  uint32_t me, n;

  void call(uint64_t step, Op op, uint64_t count, int32_t root, std::vector<Span> in, std::vector<Span> out,
            bool async) {
    CallArgs a{};
    a.op = op, a.redop = kSum, a.dtype = kInt64, a.root = root, a.count = count, a.item_bytes = 8;
    a.timeout_ns = 60 * kSecond;
    a.nin = uint32_t(in.size()), a.in = in.data(), a.nout = uint32_t(out.size()), a.out = out.data();
    if (!async) return require(c10d_run(group, &a) == kOk, "run failed", me, step);
    c10d_ticket* t = c10d_submit(group, &a);
    Failure f;
    require(c10d_wait(group, t, 60 * kSecond, step % 2, &f) == kOk, "submitted call failed", me, step);
    c10d_release(t);
  }

  void collective(uint64_t step, uint32_t kind, uint64_t count, int32_t root, bool async) {
    Values mine = input(me, step, count * n), got(count * n, -1);
    auto parts = [&](Values& v) {
      std::vector<Span> s;
      for (uint32_t r = 0; r < n; ++r) s.push_back(span(v, r * count, count));
      return s;
    };
    auto sum = [&](uint64_t i) {
      int64_t s = 0;
      for (uint32_t r = 0; r < n; ++r) s += value(r, step, i);
      return s;
    };
    const bool at_root = int32_t(me) == root;
    switch (kind) {
      case 0: call(step, kBarrier, 0, -1, {}, {}, async); break;
      case 1:
        call(step, kAllReduce, count, -1, {span(mine, 0, count)}, {span(mine, 0, count)}, async);
        for (uint64_t i = 0; i < count; ++i) require(mine[i] == sum(i), "all_reduce", me, step);
        break;
      case 2:
        if (at_root)
          call(step, kBroadcast, count, root, {span(mine, 0, count)}, {}, async);
        else
          call(step, kBroadcast, count, root, {}, {span(mine, 0, count)}, async);
        for (uint64_t i = 0; i < count; ++i) require(mine[i] == value(uint32_t(root), step, i), "broadcast", me, step);
        break;
      case 3:
        call(step, kAllGather, count, -1, {span(mine, 0, count)}, parts(got), async);
        for (uint64_t i = 0; i < got.size(); ++i)
          require(got[i] == value(uint32_t(i / count), step, i % count), "all_gather", me, step);
        break;
      case 4:
        call(step, kReduceScatter, count, -1, parts(mine), {span(got, 0, count)}, async);
        for (uint64_t i = 0; i < count; ++i) require(got[i] == sum(me * count + i), "reduce_scatter", me, step);
        break;
      case 5:
        call(step, kAllToAll, kNever, -1, parts(mine), parts(got), async);
        for (uint64_t i = 0; i < got.size(); ++i)
          require(got[i] == value(uint32_t(i / count), step, me * count + i % count), "all_to_all", me, step);
        break;
      case 6:
        call(step, kReduce, count, root, {span(mine, 0, count)},
             at_root ? std::vector<Span>{span(got, 0, count)} : std::vector<Span>{}, async);
        for (uint64_t i = 0; at_root && i < count; ++i) require(got[i] == sum(i), "reduce", me, step);
        break;
      case 7:
        call(step, kGather, count, root, {span(mine, 0, count)}, at_root ? parts(got) : std::vector<Span>{}, async);
        for (uint64_t i = 0; at_root && i < got.size(); ++i)
          require(got[i] == value(uint32_t(i / count), step, i % count), "gather", me, step);
        break;
      default:
        call(step, kScatter, count, root, at_root ? parts(mine) : std::vector<Span>{}, {span(got, 0, count)}, async);
        for (uint64_t i = 0; i < count; ++i)
          require(got[i] == value(uint32_t(root), step, me * count + i), "scatter", me, step);
    }
  }

  // Every pair its own size, many of them none.
  void uneven(uint64_t step, uint64_t count, bool async) {
    auto size = [&](uint32_t from, uint32_t to) { return (from * 7 + to * 3 + step) % 4 * count / 2; };
    uint64_t sent = 0, expected = 0;
    std::vector<Span> in, out;
    for (uint32_t r = 0; r < n; ++r) sent += size(me, r), expected += size(r, me);
    Values mine = input(me, step, sent), got(expected, -1);
    sent = expected = 0;
    for (uint32_t r = 0; r < n; ++r) {
      in.push_back(span(mine, sent, size(me, r))), out.push_back(span(got, expected, size(r, me)));
      sent += size(me, r), expected += size(r, me);
    }
    call(step, kAllToAll, kNever, -1, in, out, async);
    expected = 0;
    for (uint32_t r = 0; r < n; ++r) {
      uint64_t from = 0;
      for (uint32_t to = 0; to < me; ++to) from += size(r, to);
      for (uint64_t i = 0; i < size(r, me); ++i)
        require(got[expected + i] == value(r, step, from + i), "uneven all_to_all", me, step);
      expected += size(r, me);
    }
  }

  // Everyone sends to everyone, itself included, and receives in the opposite order of tags.
  void messages(uint64_t step, uint64_t count) {
    std::vector<Values> out, in;
    std::vector<c10d_ticket*> tickets;
    auto post = [&](bool recv, uint32_t peer, int64_t tag, Values& v) {
      MessageArgs m{};
      m.is_recv = recv, m.dtype = kInt64, m.peer = int32_t(peer), m.tag = tag;
      m.data = span(v, 0, v.size());
      m.timeout_ns = 60 * kSecond;
      tickets.push_back(c10d_post(group, &m));
    };
    out.reserve(2 * n), in.reserve(2 * n);
    for (int64_t tag = 0; tag < 2; ++tag)
      for (uint32_t r = 0; r < n; ++r) {
        out.push_back(input(me, step + uint64_t(tag), count));
        post(false, r, tag, out.back());
      }
    for (int64_t tag = 1; tag >= 0; --tag)
      for (uint32_t r = 0; r < n; ++r) {
        in.emplace_back(count, -1);
        post(true, r, tag, in.back());
      }
    Failure f;
    for (c10d_ticket* t : tickets) {
      require(c10d_wait(group, t, 60 * kSecond, step % 2, &f) == kOk, "message failed", me, step);
      c10d_release(t);
    }
    for (uint32_t k = 0; k < 2 * n; ++k)
      require(in[k] == input(k % n, step + (k < n ? 1 : 0), count), "message contents", me, step);
  }

  void program(uint64_t seed, uint64_t steps) {
    std::mt19937_64 random(seed);  // the same on every rank
    const uint64_t counts[] = {0, 1, 3, 64, 500, 511, 513, 2048, 5000, 40000};
    for (uint64_t step = 0; step < steps; ++step) {
      const uint64_t count = counts[random() % 10];
      const uint32_t kind = uint32_t(random() % 11);
      const int32_t root = int32_t(random() % n);
      const bool async = (random() + me) % 2;
      if (kind == 9)
        messages(step, count);
      else if (kind == 10)
        uneven(step, count, async);
      else
        collective(step, kind, count, root, async);
    }
  }
};

// Whoever reads a trace, at whatever moment, sees whole records of calls in order.
void read_traces(const std::vector<c10d_handle*>& groups) {
  for (uint32_t r = 0; r < groups.size(); ++r) {
    TraceRecord seen[200];
    const uint64_t found = std::min<uint64_t>(c10d_trace(groups[r], seen, 200), 200);
    uint64_t collective = 0;
    for (uint64_t i = 0; i < found; ++i) {
      const TraceRecord& t = seen[i];
      require(t.issued > 0 && (!t.ended || t.ended >= t.issued), "times of a trace record", r, t.number);
      require(t.ended ? t.status == kOk : t.status == kPending, "state of a trace record", r, t.number);
      if (t.op >= kTraceSend) continue;
      require(!collective || t.number == collective + 1, "order of trace records", r, t.number);
      collective = t.number;
      require(t.op < kOps && t.dtype == kInt64 && (t.count == kNever || t.count <= 40000), "trace record", r, t.number);
    }
  }
}

void world(uint32_t n, uint64_t seed, uint64_t steps) {
  // Small rings, so that windows wrap and close; of four ranks, pair rings that are no multiple of what is written at
  // once.
  Geometry geometry{n, n == 4 ? 5u : 3u, 4096, 4096, 1024, 4, 0};
  geometry.fan_in = uint32_t(seed / 100 % 3 ? 1 + seed / 100 % 3 : 0);  // none, 2, 3
  geometry.forced = uint32_t(seed / 100 % uint32_t(Algorithm::kCount));
  uint64_t total;
  const int fd = c10d_segment_create(&geometry, &total);
  require(fd >= 0, "no segment", 0, 0);
  std::vector<std::thread> ranks;
  std::vector<c10d_handle*> groups(n);
  for (uint32_t r = 0; r < n; ++r) {
    const int error = c10d_open(dup(fd), r, 20 * 1000, nullptr, &groups[r]);
    require(!error, "cannot open", r, uint64_t(error));
    c10d_keep_trace(groups[r], 8);
  }
  close(fd);
  for (uint32_t r = 0; r < n; ++r) ranks.emplace_back([&, r] { Rank{groups[r], r, n}.program(seed, steps); });
  std::atomic<bool> over{false};
  std::thread reader([&] {
    while (!over) read_traces(groups);
  });
  for (auto& t : ranks) t.join();
  over = true;
  reader.join();
  read_traces(groups);
  for (c10d_handle* g : groups) c10d_close(g);
  for (c10d_handle* g : groups) c10d_free(g);
}

// A call on memory that only the caller can reach.
Status agree(c10d_handle* g, Op op, uint32_t n, std::vector<uint64_t> in, std::vector<uint64_t> out, int64_t timeout) {
  std::vector<Span> ins, outs;
  for (uint64_t bytes : in) ins.push_back({reinterpret_cast<void*>(8), bytes});
  for (uint64_t bytes : out) outs.push_back({reinterpret_cast<void*>(8), bytes});
  CallArgs a{};
  a.op = op, a.redop = kPremulSum, a.dtype = kFloat32, a.root = -1, a.item_bytes = 4, a.device = kDevice;
  a.count = op == kAllToAll ? kNever : in[0] / 8;
  a.factor = double(n), a.timeout_ns = timeout;
  a.nin = uint32_t(ins.size()), a.in = ins.data(), a.nout = uint32_t(outs.size()), a.out = outs.data();
  if (op == kAllReduce) a.redop = kSum, a.dtype = kInt64, a.item_bytes = 8;
  return Status(c10d_run(g, &a));
}

// One handle for each rank of a new group.
std::vector<c10d_handle*> open_all(uint32_t n, uint32_t fan_in) {
  Geometry geometry{n, 3, 4096, 4096, 1024, 4, 0};
  geometry.fan_in = fan_in;
  uint64_t total;
  const int fd = c10d_segment_create(&geometry, &total);
  std::vector<c10d_handle*> groups(n);
  for (uint32_t r = 0; r < n; ++r) require(!c10d_open(dup(fd), r, 20 * 1000, nullptr, &groups[r]), "cannot open", r);
  close(fd);
  return groups;
}

// The sizes and factors of device calls, read back by every rank; no byte is touched (the addresses are no good).
void devices(uint32_t n, uint32_t fan_in) {
  const std::vector<c10d_handle*> groups = open_all(n, fan_in);
  std::vector<std::thread> ranks;
  for (uint32_t me = 0; me < n; ++me)
    ranks.emplace_back([&, me] {
      auto bytes = [](uint64_t step, uint32_t from, uint32_t to) { return 4 * (100000 * step + 100 * from + to); };
      for (uint64_t step = 0; step < 200; ++step) {
        std::vector<uint64_t> in, out, sizes(2 * n);
        for (uint32_t r = 0; r < n; ++r) in.push_back(bytes(step, me, r)), out.push_back(bytes(step, r, me));
        require(agree(groups[me], kAllToAll, me, in, out, 60 * kSecond) == kOk, "device agreement", me, step);
        const uint64_t seq = c10d_next_seq(groups[me]) - 1;
        for (uint32_t r = 0; r < n; ++r) {
          require(c10d_peer_sizes(groups[me], r, seq, sizes.data()) == kOk, "no sizes", me, step);
          for (uint32_t i = 0; i < n; ++i)
            require(sizes[i] == bytes(step, r, i) && sizes[n + i] == bytes(step, i, r), "sizes", me, step);
          PeerState state;
          c10d_peer_state(groups[me], r, seq, &state);
          require(said(state).factor == r, "factor", me, step);
        }
      }
      c10d_leave(groups[me]);
      c10d_set_mark(groups[me], me + 1);
      PeerState state{};
      for (uint32_t r = 0; r < n; ++r) do
          c10d_peer_state(groups[me], r, 1, &state);
        while (state.mark != r + 1);
    });
  for (auto& t : ranks) t.join();
  for (c10d_handle* g : groups) c10d_free(g);
}

// Calls that wait for nobody among calls that do; a rank that is ahead, as far as it may be; and ranks that disagree.
void run_ahead(uint32_t n, uint32_t fan_in) {
  const std::vector<c10d_handle*> groups = open_all(n, fan_in);
  std::vector<std::thread> ranks;
  std::atomic<bool> far{false};
  for (uint32_t me = 0; me < n; ++me)
    ranks.emplace_back([&, me] {
      c10d_handle* const g = groups[me];
      auto ahead = [&](uint64_t count) {
        const Span s{reinterpret_cast<void*>(8), 8 * count};
        const CallArgs a{kAllReduce, kSum, kInt64,       -1, count, 8,  kDeviceAhead, 0,
                         0,          0,    60 * kSecond, 1,  1,     &s, &s,           nullptr};
        return Status(c10d_run(g, &a));
      };
      for (uint64_t step = 0; step < 300; ++step) {
        if (step % 7 == me % 7) usleep(100);
        require(ahead(step + 1) == kOk, "ahead", me, step);
        if (step % 3) continue;
        Values v(step % 2 ? 3000 : 10, me + step);
        const Span s{v.data(), v.size() * 8};
        const CallArgs a{kAllReduce, kSum, kInt64, -1, v.size(), 8, 0, 0, 0, 0, 60 * kSecond, 1, 1, &s, &s, nullptr};
        require(c10d_run(g, &a) == kOk, "not ahead", me, step);
        for (int64_t x : v) require(x == int64_t(n * step + n * (n - 1) / 2), "wrong sum", me, step);
      }
      const uint64_t before = c10d_next_seq(g);
      while (me && !far) usleep(100);  // rank 0 comes as far as it may
      for (uint64_t i = 1; i < 3 * kCallsAhead; ++i) {
        if (!me && i == kCallsAhead - 1) {
          PeerState state;
          c10d_peer_state(g, 0, before + 1, &state);
          require(state.arrived == before + i - 2, "not so far", me, i);
          require(said(state).count == 2, "fingerprint", me, i);
          far = true;
        }
        require(ahead(i) == kOk, "far ahead", me, i);
      }
      const Status st = ahead(me == 1 ? 2 : 1);  // who came first hears of it next
      require(st == kMismatch || st == kOk, "not a mismatch", me, uint64_t(st));
      if (st == kOk) {
        Failure f{};
        while (c10d_health(g, kNever, &f) == kOk) usleep(100);
        require(f.cause == kMismatch && f.seq == c10d_next_seq(g) - 1, "another reason", me, f.seq);
      }
    });
  for (auto& t : ranks) t.join();
  for (c10d_handle* g : groups) c10d_free(g);
}

// Many collectives in flight, small ones and large, waited for in any order or by nobody.
void in_flight(uint32_t n, uint32_t fan_in) {
  const std::vector<c10d_handle*> groups = open_all(n, fan_in);
  std::vector<std::thread> ranks;
  constexpr uint64_t kCalls = 40;
  for (uint32_t me = 0; me < n; ++me)
    ranks.emplace_back([&, me] {
      c10d_handle* const g = groups[me];
      for (uint64_t round = 0; round < 20; ++round) {
        std::vector<Values> values;
        std::vector<c10d_ticket*> tickets;
        for (uint64_t i = 0; i < kCalls; ++i) values.emplace_back(i % 7 == 6 ? 3000 : 10, me + i);
        for (uint64_t i = 0; i < kCalls; ++i) {
          const Span s{values[i].data(), values[i].size() * 8};
          const CallArgs a{kAllReduce, kSum, kInt64, -1, values[i].size(), 8, 0, 0, 0, 0, 60 * kSecond,
                           1,          1,    &s,     &s, nullptr};
          tickets.push_back(c10d_submit(g, &a));
          if (i) continue;
          PeerState state;  // with the call, the others have what they need for it
          c10d_peer_state(g, me, 0, &state);
          require(state.arrived >= round * kCalls + 1, "not announced", me, round);
        }
        Failure f;
        for (uint64_t i = 0; i < kCalls; ++i) {
          const uint64_t at = (i * 7 + me) % kCalls;
          if (round % 3 == 2)  // nobody waits
            while (c10d_test(tickets[at]) == kPending) usleep(20);
          require(c10d_wait(g, tickets[at], 60 * kSecond, round % 3 == 0, &f) == kOk, "failed", me, at);
          for (int64_t v : values[at]) require(v == int64_t(n * at + n * (n - 1) / 2), "wrong sum", me, at);
        }
        for (c10d_ticket* t : tickets) c10d_release(t);
      }
    });
  for (auto& t : ranks) t.join();
  for (c10d_handle* g : groups) c10d_free(g);
}

// A rank that disagrees, one that is late, one that leaves: everyone gets a status, nobody hangs.
void faults() {
  const Geometry geometry{2, 3, 4096, 4096, 1024, 4, 0};
  auto pair = [&](auto first, auto second) {
    uint64_t total;
    const int fd = c10d_segment_create(&geometry, &total);
    c10d_handle* g[2];
    require(!c10d_open(dup(fd), 0, 0, nullptr, &g[0]) && !c10d_open(fd, 1, 0, nullptr, &g[1]), "cannot open", 2, 0);
    std::thread a([&] { first(g[0]); }), b([&] { second(g[1]); });
    a.join(), b.join();
    c10d_free(g[0]), c10d_free(g[1]);
  };
  auto reduce = [](c10d_handle* g, uint64_t count, int64_t timeout, Status want) {
    Values v(count, 1);
    const Span s{v.data(), count * 8};
    CallArgs a{kAllReduce, kSum, kInt64, -1, count, 8, 0, 0, 0, 0, timeout, 1, 1, &s, &s, nullptr};
    require(c10d_run(g, &a) == want, "unexpected status", 0, count);
  };
  pair([&](c10d_handle* g) { reduce(g, 10, 10 * kSecond, kMismatch); },
       [&](c10d_handle* g) { reduce(g, 10000, 10 * kSecond, kMismatch); });
  pair([&](c10d_handle* g) { reduce(g, 10, kSecond / 20, kTimeout); },
       [&](c10d_handle* g) {
         usleep(200000);
         reduce(g, 10, 10 * kSecond, kBroken);
       });
  pair([&](c10d_handle* g) { reduce(g, 10, 10 * kSecond, kPeerLost); }, [&](c10d_handle* g) { c10d_leave(g); });
  pair([&](c10d_handle* g) { reduce(g, 10, 10 * kSecond, kBroken); }, [&](c10d_handle* g) { c10d_abort(g); });
  // A disagreement about call 3 is nothing to 1 and 2, but what is worse is.
  auto cause = [](c10d_handle* g, uint64_t number) {
    Failure f{};
    return c10d_health(g, number, &f) == kOk ? kOk : Status(f.cause);
  };
  pair([&](c10d_handle* g) { reduce(g, 10, 10 * kSecond, kOk), reduce(g, 5000, 10 * kSecond, kOk); },
       [&](c10d_handle* g) {
         usleep(50000);
         c10d_poison(g, kMismatch, 0, 1, 3);
         usleep(50000);
         reduce(g, 10, 10 * kSecond, kOk), reduce(g, 5000, 10 * kSecond, kOk);
         require(cause(g, 2) == kOk && cause(g, 3) == kMismatch && cause(g, kNever) == kMismatch, "a disagreement", 1,
                 0);
         c10d_poison(g, kPeerLost, 0, 1, 2);
         require(cause(g, 2) == kPeerLost && cause(g, 3) == kMismatch, "worse than a disagreement", 1, 0);
       });
  // A rank that names device memory and one that names host memory.
  pair([&](c10d_handle* g) { reduce(g, 10, 10 * kSecond, kMismatch); },
       [&](c10d_handle* g) {
         require(agree(g, kAllReduce, 1, {80}, {80}, 10 * kSecond) == kMismatch, "host against device", 1, 0);
       });
}

// A block is cut among the ranks, at cache lines.
void crowd() {
  uint64_t total;
  const Geometry small{65, 2, 4096, 64, 64, 2, 0};
  require(c10d_segment_create(&small, &total) < 0, "a block with no room for each rank", 0, 0);
}

// Which ranks find that they outnumber the cpus which they may run on: bits of each one's mask, of the first two that
// this process may run on.
void cores(const std::vector<uint64_t>& masks, const std::vector<uint32_t>& outnumbered, uint32_t fan_in) {
  const std::vector<uint32_t> ours = allowed_cpus();
  if (ours.size() < 2) return;
  const uint32_t n = uint32_t(masks.size());
  Geometry geometry{n, 3, 4096, 4096, 1024, 4, 0};
  geometry.fan_in = fan_in;
  uint64_t total;
  const int fd = c10d_segment_create(&geometry, &total);
  std::vector<c10d_handle*> groups(n);
  std::vector<std::thread> ranks;
  for (uint32_t r = 0; r < n; ++r)
    ranks.emplace_back([&, r] {
      cpu_set_t mask;
      CPU_ZERO(&mask);
      for (uint32_t i = 0; i < 2; ++i)
        if (masks[r] >> i & 1) CPU_SET(ours[i], &mask);
      require(!sched_setaffinity(0, sizeof mask, &mask), "cannot bind", r, 0);
      require(!c10d_open(dup(fd), r, 20 * 1000, nullptr, &groups[r]), "cannot open", r, 0);
      Rank{groups[r], r, n}.call(1, kBarrier, 0, -1, {}, {}, false);
    });
  for (std::thread& rank : ranks) rank.join();
  require(Spinner::groups_larger_than_their_cores == outnumbered.size(), "ranks that share too few cores", n, fan_in);
  uint32_t left = uint32_t(outnumbered.size());
  for (uint32_t r = 0; r < n; ++r) {
    c10d_free(groups[r]);
    left -= std::count(outnumbered.begin(), outnumbered.end(), r) > 0;
    require(Spinner::groups_larger_than_their_cores == left, "ranks that are left", r, left);
  }
  close(fd);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t steps = argc > 1 ? strtoull(argv[1], nullptr, 10) : 300;
  for (uint64_t seed = 1; seed <= 6; ++seed)
    for (uint32_t n : {1u, 2u, 3u, 4u, 5u}) world(n, seed * 100 + n, steps);
  faults();
  crowd();
  for (uint32_t fan_in : {0u, 2u}) {
    cores({1, 1, 1}, {0, 1, 2}, fan_in);
    cores({1, 2}, {}, fan_in);
    cores({3, 3}, {}, fan_in);
    cores({3, 3, 3, 1}, {0, 1, 2}, fan_in);
    cores({1, 2, 1, 2, 3}, {0, 1, 2, 3}, fan_in);
  }
  for (uint32_t fan_in : {0u, 2u}) {
    for (uint32_t n : {1u, 2u, 3u, 5u}) devices(n, fan_in);
    for (uint32_t n : {2u, 3u, 5u}) in_flight(n, fan_in), run_ahead(n, fan_in);
  }
  std::puts("group_test: ok");
}
