// What the C ABI takes from others, made hostile: headers of segments, and what a peer writes into the segment while
// this rank runs collectives and messages. Nothing of it may make us read or write out of bounds, or hang: the callers'
// buffers are heap blocks of their exact size, for AddressSanitizer to watch. And arguments that make no sense.
//
//   fuzz_test [trials / 10] [seed]
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../shm/api.h"
#include "../hosts/pipelined_reduce.h"
#include "../shm/layout.h"
#include "../shm/pages.h"
#include "../shm/reduce.h"
#include "require.h"
#include "tickets.h"

using namespace c10d_custom;

namespace {

constexpr int64_t kMs = 1000 * 1000;
using Random = std::mt19937_64;

template <class T>
T pick(Random& random, std::initializer_list<T> from) {
  return *(from.begin() + random() % from.size());
}

// --- headers

uint32_t odd_number(Random& random) {
  switch (random() % 4) {
    case 0: return uint32_t(random());
    case 1: return 1u << (random() % 32);
    case 2: return (1u << (random() % 32)) - 1;
    default: return uint32_t(random() % 100);
  }
}

// The segment's true length, with no overflow.
unsigned __int128 true_total(const Geometry& g) {
  const Layout l(g);
  const auto pairs = (unsigned __int128)(l.pairs) + (unsigned __int128)(g.ranks) * g.ranks * l.pair_bytes;
  return (pairs + page_bytes() - 1) / page_bytes() * page_bytes() + (unsigned __int128)(g.ranks) * g.arena_bytes;
}

// Geometries of 4096 ranks whose pairs take 2^64 bytes.
std::vector<Geometry> overflowing() {
  std::vector<Geometry> found;
  const uint64_t lines = (1ull << 40) / 64;  // of one pair
  for (uint64_t ring = lines - 4096 / 64 + 1; ring <= lines; ++ring)
    for (uint32_t cells = 16500; cells <= 65536 && found.size() < 8; ++cells)
      if (ring % cells == 0) {
        const Geometry g{4096, 2, 4096 * 64, 64, uint32_t(ring / cells * 64 - sizeof(CellHeader)), cells, 0, 0};
        if (Layout(g).total < (1ull << 35)) found.push_back(g);
      }
  return found;
}

void headers(Random& random, uint64_t trial) {
  Geometry g{2, 3, 4096, 4096, 1024, 4, 0, page_bytes() * (random() % 3)};
  uint32_t* const fields[] = {&g.ranks,           &g.window,         &g.block_bytes,     &g.small_bytes,
                              &g.cell_bytes,      &g.cells,          &g.call_slot_bytes, &g.fan_in,
                              &g.two_steps_bytes, &g.in_place_bytes, &g.forced};
  for (unsigned i = random() % 4; i; --i) *fields[random() % std::size(fields)] = odd_number(random);
  if (random() % 8 == 0) g.arena_bytes = random() % 2 ? random() : (1ull << random() % 64) - random() % 2;
  if (random() % 3 == 0) {
    // Rings between ranks whose lengths add up to 2^64 bytes and a little: the sum in 64 bits is small.
    static const std::vector<Geometry> wrapping = overflowing();
    require(!wrapping.empty(), "no geometry overflows", trial);
    g = wrapping[random() % wrapping.size()];
  }
  const uint64_t claimed = Layout(g).total;
  const uint64_t length = claimed <= (1ull << 34) ? claimed : 1 << 20;
  const int fd = int(memfd_create("fuzz", MFD_CLOEXEC));
  require(fd >= 0 && !ftruncate(fd, off_t(length)), "no memfd", trial);
  SegmentHeader h{};
  h.magic = random() % 8 ? kMagic : random();
  h.bytes = claimed;
  h.geometry = g;
  unsigned char raw[sizeof h];
  memcpy(raw, &h, sizeof h);
  if (random() % 4 == 0) raw[random() % sizeof raw] ^= uint8_t(1 << random() % 8);
  require(pwrite(fd, raw, sizeof raw, 0) == ssize_t(sizeof raw), "cannot write a header", trial);
  memcpy(&h.geometry, raw + offsetof(SegmentHeader, geometry), sizeof g);
  c10d_handle* group = nullptr;
  const int error = c10d_open(fd, uint32_t(random() % 3), 0, nullptr, &group);
  if (!group) return require(error != 0, "refused without a reason", trial);
  require(error == 0, "opened, and an error", trial);
  require(true_total(h.geometry) == length, "a header that promises more than the segment holds was taken", trial);
  c10d_free(group);
}

// --- a hostile peer

struct World {
  static constexpr uint32_t n = 2;
  const Geometry geometry;
  const Layout layout{geometry};
  const uint32_t me, other;  // the victim's rank, the peer's
  c10d_handle* victim;
  char* base;

  static Geometry sizes(uint32_t fan_in) {
    Geometry g{n, 3, 4096, 4096, 1024, 4, 0, 1 << 20};
    g.fan_in = fan_in, g.two_steps_bytes = fan_in ? 512 : 0;
    return g;
  }
  // fan_in: 2: with a combining tree and sums in two steps, 0: without.
  explicit World(uint32_t victims_rank, uint32_t fan_in = 0)
      : geometry(sizes(fan_in)), me(victims_rank), other(1 - me) {
    uint64_t total;
    const int fd = c10d_segment_create(&geometry, &total);
    base = static_cast<char*>(mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    require(base != MAP_FAILED && !c10d_open(fd, me, 0, nullptr, &victim), "no world", 0);
    tell_what_there_is();
  }
  ~World() {
    c10d_free(victim);
    munmap(base, layout.total);
  }
  RankCtl& ctl(uint32_t r) { return *reinterpret_cast<RankCtl*>(base + layout.ctl + r * sizeof(RankCtl)); }
  uint64_t* table(uint32_t r, uint64_t seq) {
    return reinterpret_cast<uint64_t*>(base + layout.tables + r * layout.table_bytes) + (seq & 1) * 3 * n;
  }
  PairCtl& pair(uint32_t src, uint32_t dst) {
    return *reinterpret_cast<PairCtl*>(base + layout.pairs + (src * n + dst) * layout.pair_bytes);
  }
  CellHeader& cell(uint32_t src, uint32_t dst, uint64_t i) {
    return *reinterpret_cast<CellHeader*>(base + layout.pairs + (src * n + dst) * layout.pair_bytes + sizeof(PairCtl) +
                                          i % geometry.cells * layout.cell_stride);
  }
  Flow& flow(uint32_t src, uint32_t dst) {
    return reinterpret_cast<Flow*>(base + layout.flows + src * (layout.flow_bytes + layout.pair_rings_bytes))[dst];
  }
  Signal& all_come() { return reinterpret_cast<SegmentHeader*>(base)->all_come; }
  // What the victim looks at only where it is told that it is there.
  void tell_what_there_is() {
    memset(base + layout.has_cells, 1, n * n);
    ctl(other).has_pair_rings = 1;
  }
};

uint64_t odd_bytes(Random& random) {
  const uint64_t near = pick<uint64_t>(random, {0, 8, 800, 1024, 4096, 24000, 1ull << 31, 1ull << 32, 1ull << 63, 0});
  return random() % 3 ? near : near + random() % 17 - 8;
}

// What the victim takes for messages: cells that make sense but for a field or two.
void send_cells(World& w, Random& random) {
  const uint32_t src = random() % 8 ? w.other : w.me;
  PairCtl& p = w.pair(src, w.me);
  const uint64_t tail = p.tail.load();
  if (random() % 2) {  // a long message that fits a receive, and more or less of its data than it takes
    const uint64_t bytes = 8 * pick<uint64_t>(random, {0, 1, 100, 128, 512, 513, 3000}), message = random() % 8;
    w.cell(src, w.me, tail) = {2, kInt64, int64_t(random() % 3), message, bytes};
    for (uint64_t i = 1; i < 4; ++i)
      w.cell(src, w.me, tail + i) = {5, kInt64, 0, message, random() % 2 ? 1024 : bytes % 1024};
    p.tail.store(tail + 1 + random() % 4);
    return;
  }
  for (uint64_t i = random() % 5; i; --i) {
    CellHeader& c = w.cell(src, w.me, tail + i - 1);
    c.kind = random() % 16 ? uint32_t(random() % 8) : uint32_t(random());
    c.dtype = random() % 16 ? kInt64 : uint32_t(random());
    c.tag = int64_t(random() % 3);
    c.message = random() % 16 ? random() % 8 : random();
    c.bytes = odd_bytes(random);
  }
  p.tail.store(random() % 32 ? tail + random() % 5 : random());
  if (random() % 32 == 0) p.head.store(random());
  if (random() % 32 == 0)
    w.pair(w.me, w.other).head.store(random());
  else
    w.pair(w.me, w.other).head.store(w.pair(w.me, w.other).tail.load());  // lets the victim go on sending
}

// Joins the victim's collective as a well-behaved rank would, but for some of the numbers.
void join_call(World& w, Random& random) {
  RankCtl &mine = w.ctl(w.other), &victim = w.ctl(w.me);
  const uint64_t seq = victim.arrive.value.load();
  Fingerprint f = victim.fingerprint[seq & 1];
  if (random() % 8 == 0) f.place = odd_bytes(random);
  if (random() % 256 == 0) reinterpret_cast<unsigned char*>(&f)[random() % sizeof f] ^= uint8_t(random());
  mine.fingerprint[seq & 1] = f;
  const uint64_t* said = w.table(w.me, seq);
  uint64_t* table = w.table(w.other, seq);
  for (uint32_t i = 0; i < World::n; ++i) {
    table[i] = i == w.me ? said[World::n + w.other] : odd_bytes(random);
    table[World::n + i] = i == w.me ? said[w.other] : odd_bytes(random);
    table[2 * World::n + i] = random() % 2 ? 0 : odd_bytes(random);
  }
  if (random() % 2) table[w.other] = 0 - table[w.me] + random() % 4096;  // a sum that overflows
  mine.arrive.value.store(random() % 256 ? seq : random());
  if (w.geometry.fan_in) {
    const uint64_t rounds = victim.rounds.load() + random() % 2;
    mine.rounds.store(rounds);
    w.all_come().value.store(random() % 64 ? 2 * rounds + random() % 2 : random());
  }
  for (Signal RankCtl::* s : {&RankCtl::in, &RankCtl::red, &RankCtl::out, &RankCtl::took}) {
    const uint64_t own = (victim.*s).value.load();
    (mine.*s).value.store(pick<uint64_t>(random, {own, own + 1, own + 3, own, own + 2, random() % 64}));
    (victim.*s).wake_at.store(random());
  }
  Flow &to_victim = w.flow(w.other, w.me), &from_victim = w.flow(w.me, w.other);
  const uint64_t taken = to_victim.taken.load(), sent = from_victim.sent.load();
  to_victim.sent.store(taken + pick<uint64_t>(random, {0, 8, 800, 4096, w.layout.pair_rings_bytes,
                                                       w.layout.pair_rings_bytes + 1, random()}));
  from_victim.taken.store(sent - pick<uint64_t>(random, {0, 0, 8, 800, w.layout.pair_rings_bytes,
                                                         w.layout.pair_rings_bytes + 1, random()}));
  if (random() % 64 == 0) from_victim.sent.store(random());
  if (random() % 64 == 0) to_victim.taken.store(random());
}

void anything(World& w, Random& random) {
  // Not the liveness of a hang: the header was read long ago, what else is there may be anything.
  char* const at = w.base + w.layout.ctl + random() % (w.layout.total - w.layout.ctl - 8);
  const uint64_t value = odd_bytes(random);
  memcpy(at, &value, 1 + random() % 8);
}

void victim_calls(World& w, Random& random, uint64_t trial) {
  auto block = [](uint64_t bytes) { return std::unique_ptr<char[]>(new char[bytes]()); };
  std::vector<std::unique_ptr<char[]>> buffers;
  std::vector<std::pair<c10d_arena*, void*>> blocks;
  auto span = [&](uint64_t bytes) {
    int error;
    c10d_arena* arena;
    if (void* at = random() % 4 ? nullptr : c10d_take(w.victim, bytes, 0, &arena, &error)) {
      blocks.emplace_back(arena, at);
      return Span{at, bytes};
    }
    buffers.push_back(block(bytes));
    return Span{buffers.back().get(), bytes};
  };
  std::vector<c10d_ticket*> tickets;
  for (int step = 0; step < 6; ++step) {
    const uint64_t count = pick<uint64_t>(random, {0, 1, 100, 128, 512, 513, 3000});
    MessageArgs m{};
    m.is_recv = random() % 2, m.dtype = kInt64,
    m.peer = random() % 4 ? int32_t(w.other)
             : m.is_recv  ? -1
                          : int32_t(w.me);
    m.tag = int64_t(random() % 3), m.data = span(8 * count), m.timeout_ns = 10 * kMs;
    tickets.push_back(c10d_post(w.victim, &m));
    CallArgs a{};
    a.op = uint32_t(random() % kRejected), a.redop = pick<uint32_t>(random, {kSum, kPremulSum, kAvg, kMax});
    a.dtype = a.redop == kPremulSum ? uint32_t(kFloat64) : uint32_t(kInt64);
    a.root = int32_t(random() % 2), a.item_bytes = 8, a.timeout_ns = 10 * kMs;
    a.count = a.op == kAllToAll || random() % 4 == 0 ? kNever : count;
    Span in[2], out[2];
    const bool rooted = uint32_t(a.root) == w.me;
    a.nin = a.op == kBarrier || ((a.op == kBroadcast || a.op == kScatter) && !rooted) ? 0
            : a.op == kReduceScatter || a.op == kAllToAll || a.op == kScatter         ? 2
                                                                                      : 1;
    a.nout = a.op == kBarrier || ((a.op == kReduce || a.op == kGather) && !rooted) || (a.op == kBroadcast && rooted) ? 0
             : a.op == kAllGather || a.op == kAllToAll || a.op == kGather ? 2
                                                                          : 1;
    for (uint32_t i = 0; i < a.nin; ++i) in[i] = span(8 * count);
    for (uint32_t i = 0; i < a.nout; ++i)
      out[i] = span(8 * (a.op == kAllToAll && i != w.me ? count + random() % 6000 : count));
    a.in = in, a.out = out;
    // A reduction over hosts of which there is one only: nothing to transfer.
    PipelinedReduce pipelined{};
    PipelinedSlot slots[2]{};
    if ((a.op == kAllReduce || a.op == kReduce) && random() % 2) {
      pipelined.chunk = 64 * (1 + random() % 100), pipelined.carriers = 1 + uint32_t(random() % 2), pipelined.op = kSum;
      pipelined.hosts = 1, pipelined.keeps = 1, pipelined.nslots = 2,
      pipelined.slots = w.me < pipelined.carriers ? slots : nullptr;
      for (PipelinedSlot& s : slots) s.mine = static_cast<char*>(span(pipelined.chunk).data);
      a.pipelined = &pipelined;
    }
    const int status = c10d_run(w.victim, &a);
    require(status >= kOk && status != kPending && status <= kForked, "a status that there is not", trial);
    PeerState state;
    c10d_peer_state(w.victim, uint32_t(random() % 3), random() % 4, &state);
    c10d_probe(w.victim, int64_t(random() % 3));
    Failure f;
    c10d_health(w.victim, random() % 4, &f);
  }
  Failure f;
  for (c10d_ticket* t : tickets) {
    c10d_wait(w.victim, t, 5 * kMs, 0, &f);
    c10d_release(t);
  }
  c10d_leave(w.victim);  // before the buffers go
  for (auto [arena, at] : blocks) c10d_give_back(arena, at);
}

void hostile_peer(Random& random, uint64_t trial) {
  World w(uint32_t(random() % 2), random() % 2 ? 2 : 0);
  std::atomic<bool> over{false};
  Random theirs(random());
  std::thread peer([&] {
    while (!over) {
      switch (theirs() % 4) {
        case 0: send_cells(w, theirs); break;
        case 1:
          if (theirs() % 64 == 0) anything(w, theirs);
          break;
        default: join_call(w, theirs);
      }
      if (theirs() % 8 == 0) usleep(useconds_t(theirs() % 200));
    }
  });
  victim_calls(w, random, trial);
  over = true;
  peer.join();
}

// A table of all_to_all that leads to 64 KiB before the peer's slot, whether one adds up its sizes or takes its word.
void overflowing_table() {
  World w(1);
  constexpr uint64_t far = 64 << 10;
  std::vector<char> sent(16), got(8), back(far);
  const Span in[] = {{sent.data(), 8}, {sent.data() + 8, 8}}, out[] = {{back.data(), 8}, {got.data(), 8}};
  CallArgs a{};
  a.op = kAllToAll, a.dtype = kInt64, a.root = -1, a.count = kNever, a.item_bytes = 8, a.timeout_ns = 1000 * kMs;
  a.nin = a.nout = 2, a.in = in, a.out = out;
  Fingerprint f{};
  f.seq = 1, f.op = a.op, f.dtype = a.dtype, f.root = a.root, f.count = a.count;
  w.ctl(0).fingerprint[1] = f;
  const uint64_t table[] = {0 - far, 8, 0, 8, 0, 0 - far};
  memcpy(w.table(0, 1), table, sizeof table);
  w.ctl(0).arrive.value.store(1);
  require(c10d_run(w.victim, &a) == kMismatch, "a table that makes no sense was taken", 0);
}

// A peer whose tensor is where it can be is read there; one that says it is elsewhere is to put it into its ring. Once
// the victim has given up, what the peer still writes is nothing to it.
void odd_places() {
  const uint64_t arena = World(0).geometry.arena_bytes, bytes = 24000;
  for (const uint64_t place : {uint64_t(1), arena + 1 - bytes, arena + 2 - bytes, arena, arena + 1, kNever}) {
    World w(1);
    int error;
    c10d_arena* own;
    void* const block = c10d_take(w.victim, bytes, 0, &own, &error);
    const Span s{block, bytes};
    const CallArgs a{kAllReduce, kSum, kInt64, -1, bytes / 8, 8, 0, 0, 0, 0, 300 * kMs, 1, 1, &s, &s, nullptr};
    w.ctl(0).fingerprint[1] = {1, a.op, a.redop, a.dtype, a.root, a.count, 0, 0, 0, 0, place};
    w.ctl(0).arrive.value.store(1);
    w.ctl(0).in_place.store(1);
    require(c10d_run(w.victim, &a) == kTimeout, "a peer that does nothing", place);
    const uint32_t blocks = place - 1 <= arena - bytes ? 1 : w.geometry.window;
    require(w.ctl(1).in.value.load() == blocks, "read where it is not", place);
    char *const mine = static_cast<char*>(block), *const seen = w.base + w.layout.arenas + arena;
    mine[0] = mine[bytes - 1] = 5;
    require(seen[0] == 0 && seen[bytes - 1] == 0, "the peer reads what was written since", place);
    memset(seen, 9, bytes);
    require(mine[0] == 5 && mine[bytes - 1] == 5, "the peer writes to it still", place);
    c10d_give_back(own, block);
  }
}

// --- arguments

void arguments(Random& random, uint64_t trial) {
  World w(uint32_t(random() % 2), random() % 2 ? 2 : 0);
  std::vector<char> data(64);
  std::vector<Span> spans(random() % 4, Span{data.data(), 8});
  CallArgs a{};
  a.op = random() % 4 ? uint32_t(random() % 12) : uint32_t(random());
  a.redop = random() % 2 ? uint32_t(random() % 12) : uint32_t(random());
  a.dtype = random() % 2 ? uint32_t(random() % 30) : uint32_t(random());
  a.root = random() % 2 ? int32_t(random() % 4) - 1 : int32_t(random());
  a.count = random() % 2 ? kNever : random();
  a.item_bytes = pick<uint32_t>(random, {0, 1, 2, 3, 8, 64, 128, uint32_t(random())});
  a.timeout_ns = pick<int64_t>(random, {0, -1, INT64_MIN, kMs});
  a.factor = 2;
  std::vector<Span> in = spans, out(random() % 4, Span{data.data(), random() % 2 * 8});
  a.nin = uint32_t(in.size()), a.in = in.data(), a.nout = uint32_t(out.size()), a.out = out.data();
  const int status = c10d_run(w.victim, &a);
  require(status == kUsage || status == kTimeout || (status == kOk && a.op == kRejected), "odd arguments were taken",
          trial);
  MessageArgs m{};
  m.is_recv = uint32_t(random() % 3), m.dtype = uint32_t(random());
  m.peer = random() % 2 ? int32_t(random() % 8) - 4 : int32_t(random());
  m.tag = int64_t(random()), m.data = Span{data.data(), 8}, m.timeout_ns = pick<int64_t>(random, {0, INT64_MIN, kMs});
  c10d_ticket* t = c10d_post(w.victim, &m);
  Failure f;
  const int st = c10d_wait(w.victim, t, 0, 0, &f);
  const bool makes_sense = m.peer < int32_t(World::n) && (m.peer >= 0 || (m.is_recv && m.peer == -1));
  if (!makes_sense) require(st == kUsage || st == kBroken, "a message to nobody was taken", trial);
  c10d_release(t);
  PeerState state;
  require(c10d_peer_state(w.victim, 2 + uint32_t(random() % 1000), 0, &state) == kUsage, "the state of nobody", trial);
  Geometry g;
  uint32_t raw[sizeof g / sizeof(uint32_t)];
  for (uint32_t& x : raw) x = odd_number(random);
  memcpy(&g, raw, sizeof g);
  // Sizes that could be had are left out: they would be.
  if (true_total(g) > ((unsigned __int128)(1) << 63)) {
    uint64_t total;
    require(c10d_segment_create(&g, &total) < 0, "an impossible segment", trial);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t trials = 10 * (argc > 1 ? strtoull(argv[1], nullptr, 10) : 50);
  overflowing_table();
  odd_places();
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  for (uint64_t trial = 0; trial < trials; ++trial) {
    Random random(seed * 1000003 + trial);
    for (int i = 0; i < 20; ++i) headers(random, trial);
    for (int i = 0; i < 5; ++i) arguments(random, trial);
    hostile_peer(random, trial);
  }
  std::puts("fuzz_test: ok");
}
