// all_to_all, also with uneven splits: each ordered pair of ranks has a pair ring, and pair rings do not wait for one
// another.
//
// A pair ring is a ring of bytes, part of its writer's pair rings in the segment. The writer adds to `sent`, the reader
// to `taken`; `sent - taken` bytes are in it. A rank that can move nothing in any pair ring sleeps until someone wakes
// it. So while a rank is off its core the others go on with what they have for each other. (In blocks that all must
// have drained, all would stand still.)
//
// A pair ring is empty when both its ranks have left a call, for the reader leaves when it has everything. A rank
// writes as soon as it has announced what it sends, where the reader has left the call before; nobody reads before all
// agree, so that ranks which disagree have nothing written into their tensors.
#include <optional>
#include <vector>

#include "collective.h"

namespace c10d_custom {
namespace {

class PairRings final : public Wait {
 public:
  explicit PairRings(Collective& collective)
      : c(collective),
        g(c.g),
        capacity(g.layout.pair_rings_bytes / (c.n - 1) / 64 * 64),
        crowded(long(c.n) > cores()),
        piece(std::max<uint64_t>(capacity / (crowded ? 2 : 8) / 64 * 64, 64)),
        peers(c.n) {
    for (uint32_t r = 0; r < c.n; ++r) {
      if (r == c.me) continue;
      peers[r].sent_before = g.flow(c.me, r).sent.load(std::memory_order_relaxed);
      peers[r].taken_before = g.taken[r];
      to_move += c.in_bytes(r) + c.out_bytes(r);
    }
    progress(0);
  }

  // Writes while others have still to come.
  bool fill() {
    while (!all_here())
      if (!(ready() ? c.may_go_on(here) : sleep(here))) return false;
    return true;
  }

  // Once all agree. `everything`: bytes of all ranks' input and output.
  bool run(uint64_t everything) {
    agreed = true;
    copy = CopyOut(everything);
    while (moved < to_move) {
      if (ready()) {
        if (moved < to_move && !c.may_go_on(unfinished())) return false;
      } else if (!own_done) {
        copy_own();
      } else if (!sleep(unfinished())) {
        return false;
      }
    }
    if (!own_done) copy_own();
    progress(1);
    return true;
  }

  // One round through the pair rings, on every rank with other peers first: all that can be written, all that there is
  // to read.
  bool ready() override {
    const uint64_t before = moved;
    for (uint32_t d = 1; d < c.n; ++d) {
      write((c.me + d) % c.n);
      if (agreed) read((c.me + c.n - d) % c.n);
    }
    return moved != before || (!agreed && all_here());
  }

  const void* ask(uint32_t* seen) override {
    // In this order: who clears `sleeping` has not rung yet.
    *seen = doorbell().rings.load(std::memory_order_seq_cst);
    doorbell().sleeping.store(1, std::memory_order_seq_cst);
    return &doorbell().rings;
  }

  bool lost(uint32_t* peer) override {
    return g.any_gone([&](uint32_t r) { return !(finished(r) && arrived(r)); }, peer);
  }

 private:
  struct Peer {
    uint64_t sent_before, taken_before;  // the counters when the call began
    uint64_t sent = 0, taken = 0;        // in this call
  };

  // Whether all have announced their call.
  bool all_here() {
    while (here < c.n && arrived(here)) ++here;
    return here == c.n;
  }

  bool arrived(uint32_t r) const { return g.ctl(r).arrive.value.load(std::memory_order_seq_cst) >= c.seq; }

  bool sleep(uint32_t for_whom) {
    // Where ranks outnumber cores and much is left, at once: a sleeper wakes on a core that has time for it, one that
    // yields stays where it is.
    const bool yields = !crowded || to_move - moved < g.layout.pair_rings_bytes;
    if (!c.wait(*this, yields, for_whom)) return false;
    doorbell().sleeping.store(0, std::memory_order_relaxed);
    return true;
  }

  // Nothing that a peer has written is trusted: neither more room nor more bytes than a pair ring has. A pair ring's
  // worth a visit, however fast the other side is: then the other pair rings, the deadline and an abort have their
  // turn.
  void write(uint32_t to) {
    Peer& p = peers[to];
    Flow& flow = g.flow(c.me, to);
    const uint64_t all = c.in_bytes(to), before = p.sent;
    while (p.sent < all && p.sent - before < capacity) {
      const uint64_t used = p.sent_before + p.sent - flow.taken.load(std::memory_order_seq_cst);
      // Every call begins at the pair ring's first byte, hence when all of the last is out of it.
      if (used > capacity || (!p.sent && used)) break;
      const uint64_t at = p.sent % capacity, size = std::min({piece, all - p.sent, capacity - at});
      if (capacity - used < size) break;
      g.copy_in(pair_ring(c.me, to) + at, c.in(to) + p.sent, size);
      p.sent += size;
      flow.sent.store(p.sent_before + p.sent, std::memory_order_seq_cst);
    }
    went_on(to, p.sent - before);
  }

  void read(uint32_t from) {
    Peer& p = peers[from];
    // One whose own input is small takes memory when all agree.
    if (!g.ctl(from).has_pair_rings.load(std::memory_order_seq_cst)) return;
    Flow& flow = g.flow(from, c.me);
    const uint64_t all = c.out_bytes(from), before = p.taken;
    while (p.taken < all && p.taken - before < capacity) {
      const uint64_t there = flow.sent.load(std::memory_order_seq_cst) - p.taken_before - p.taken;
      if (!there || there > capacity) break;
      const uint64_t at = p.taken % capacity, size = std::min({piece, there, all - p.taken, capacity - at});
      g.team.copy(copy, c.out(from) + p.taken, pair_ring(from, c.me) + at, size);
      p.taken += size;
      g.taken[from] = p.taken_before + p.taken;
      flow.taken.store(g.taken[from], std::memory_order_seq_cst);
    }
    went_on(from, p.taken - before);
  }

  void went_on(uint32_t peer, uint64_t bytes) {
    if (!bytes) return;
    moved += bytes;
    // Nobody reads before all are here: who comes last wakes all, and they find what was written before
    // (tests/protocol_models/gathering.py).
    if (all_here()) Group::wake(g.ctl(peer).pair_rings);
    progress(double(moved) / double(to_move));
  }

  // For straggler(). It ends at 1 on all ranks, and begins there for the next call of another kind.
  void progress(double part) { g.ctl(c.me).progress.store(uint32_t(1000 * part), std::memory_order_relaxed); }

  void copy_own() {
    own_done = true;
    char *to = c.out(c.me), *from = c.in(c.me);
    const uint64_t size = c.in_bytes(c.me);
    if (!size) return;
    if (to + size <= from || from + size <= to)
      g.team.copy(copy, to, from, size);
    else
      memmove(to, from, size);
  }

  static long cores() {
    static const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online;
  }
  Doorbell& doorbell() const { return g.ctl(c.me).pair_rings; }
  char* pair_ring(uint32_t writer, uint32_t reader) const {
    return g.pair_rings(writer) + (reader - (reader > writer)) * capacity;  // nobody writes to itself
  }
  bool finished(uint32_t r) const { return peers[r].sent == c.in_bytes(r) && peers[r].taken == c.out_bytes(r); }
  uint32_t unfinished() const {
    for (uint32_t r = 0; r < c.n; ++r)
      if (r != c.me && !finished(r)) return r;
    return c.me;
  }

  Collective& c;
  Group& g;
  const uint64_t capacity;  // of a pair ring, in bytes
  const bool crowded;
  const uint64_t piece;  // bytes that are written or read before the other side is told
  CopyOut copy{0};
  std::vector<Peer> peers;
  uint64_t to_move = 0, moved = 0;
  uint32_t here = 0;  // the first that may not have announced its call yet
  bool agreed = false, own_done = false;
};

// Those who came before sleep until all are here.
void ring_if_last(Collective& c) {
  for (uint32_t r = 0; r < c.n; ++r)
    if (c.g.ctl(r).arrive.value.load(std::memory_order_seq_cst) < c.seq) return;
  for (uint32_t r = 0; r < c.n; ++r)
    if (r != c.me) Group::wake(c.g.ctl(r).pair_rings);
}

}  // namespace

bool pair_rings_all_to_all(Collective& c) {
  Group& g = c.g;
  std::optional<PairRings> pair_rings;
  if (c.input_bytes() <= g.geometry.small_bytes) {
    c.stage_small();  // it has a table, hence slots
  } else {
    if (!c.has_memory(&Group::reserve_pair_rings)) return false;
    pair_rings.emplace(c);
  }
  c.announce();
  ring_if_last(c);
  if (pair_rings && !pair_rings->fill()) return false;
  if (!c.agree()) return false;
  // Which way all go follows from everyone's bytes: the large one where anybody's input is.
  uint64_t most = 0, everything = 0;
  for (uint32_t r = 0; r < c.n; ++r) {
    const uint64_t sum = g.ctl(r).fingerprint[c.seq & 1].place;
    most = std::max(most, sum);
    everything += 2 * sum;
  }
  if (c.all_to_all_fits_small(most)) return c.collect_small_all_to_all();
  if (!c.has_memory(&Group::reserve_pair_rings)) return false;
  if (!pair_rings) pair_rings.emplace(c);
  return pair_rings->run(everything);
}

}  // namespace c10d_custom
