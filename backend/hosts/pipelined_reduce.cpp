// A reduction over hosts: all_reduce, or reduce to a root on one of them, of more than fits a message or two.
//
// The tensor is cut into chunks, a chunk into parts, one for each of the ranks that carry data between the hosts
// (carriers), a part into pieces that fit the rings. Piece by piece, five stages run ahead of each other as far as
// memory lets them:
//
//   fill      copy the pieces of the other carriers' parts into my ring            -> signal `in`
//   take      sum my part's piece over the ranks, into a chunk's slot           -> signal `took`
//   exchange  the whole part with the same carrier of the other hosts
//   place     combine what the hosts have given, into my ring                   -> signal `red`
//   drain     copy the other carriers' pieces to my output                         -> signal `out`
//
// A block of a rank's ring has room for one piece of each carrier. In the rooms of the others lie pieces that wait to
// be taken, in its own one that waits to be drained: two streams, each with its counters.
//
// Nobody sleeps on a single condition here: a transfer wakes no futex, so that the ranks look at everything again and
// again. Every stage of a piece waits only for earlier stages of its chunk or for stages of earlier chunks, on whatever
// rank or host, so some rank can always go on.
#include "pipelined_reduce.h"

#include <algorithm>
#include <vector>

#include "../shm/collective.h"
#include "mpi_driver.h"
#include "../shm/waiting.h"

namespace c10d_custom {

namespace {

class PipelinedRun {
 public:
  explicit PipelinedRun(Collective& collective)
      : c(collective),
        g(c.g),
        b(*c.args.pipelined),
        mine(g.ctl(c.me)),
        me(c.me),
        n(c.n),
        window(g.geometry.window),
        base(g.blocks_done),
        taken_base(g.blocks_taken),
        total(c.in_bytes(0)),
        room(g.geometry.block_bytes / b.carriers / 64 * 64),
        chunks((total + b.chunk - 1) / b.chunk),
        carrier(b.slots),
        drains(b.keeps && c.args.nout),
        inside(c.kernel()),
        between(reduce_kernel(c.args.dtype, b.op)),
        src(std::max(n, b.hosts)) {
    for (uint32_t p = 0; p < b.carriers; ++p) pieces = std::max(pieces, (part(0, p).bytes + room - 1) / room);
    blocks = chunks * pieces;
    if (!carrier) took = blocks;
    if (!carrier || !b.keeps) placed = blocks;
    if (!drains) drained = blocks;
  }

  bool run() {
    if (!c.has_memory(&Group::reserve_ring)) return false;
    c.announce();
    fill_all();
    if (!c.agree()) return false;
    if (!drains && !carrier) g.advance(mine.out, base + blocks);
    int64_t idle_since = 0;
    while (!over()) {
      bool moved = false;
      for (auto stage : {&PipelinedRun::fill_all, &PipelinedRun::take_all, &PipelinedRun::place_all,
                         &PipelinedRun::drain_all, &PipelinedRun::go_on})
        if ((this->*stage)()) moved = true;
      if (failed_) return false;
      if (b.end) return c.give_up();
      if (!moved) {
        if (!idle_since) idle_since = looked_ = now_ns();
        if (!over() && !idle(idle_since)) return false;
      } else {
        idle_since = 0;
        if (late(now_ns()) || !c.may_go_on(me)) return b.end ? c.give_up() : false;
      }
    }
    g.advance(mine.red, base + blocks);
    g.advance(mine.took, taken_base + blocks);
    g.blocks_done = base + blocks;
    g.blocks_taken = taken_base + blocks;
    return true;
  }

 private:
  struct Range {
    uint64_t at, bytes;
  };

  // Of the tensor: carrier p's part of a chunk.
  Range part(uint64_t chunk, uint32_t p) const {
    const uint64_t at = chunk * b.chunk, size = std::min(b.chunk, total - std::min(total, at)),
                   lines = (size + 63) / 64;
    const uint64_t lo = std::min(size, lines * p / b.carriers * 64),
                   hi = std::min(size, lines * (p + 1) / b.carriers * 64);
    return {at + lo, hi - lo};
  }
  // Of the tensor: carrier p's piece in block k.
  Range piece(uint64_t k, uint32_t p) const {
    const Range whole = part(k / pieces, p);
    const uint64_t from = std::min(whole.bytes, offset(k));
    return {whole.at + from, std::min(room, whole.bytes - from)};
  }
  // Of block k's pieces in their parts.
  uint64_t offset(uint64_t k) const { return k % pieces * room; }
  char* ring(uint32_t r, uint64_t k, uint32_t p) const { return g.block(r, base + k) + p * room; }
  PipelinedSlot& slot(uint64_t chunk) const { return b.slots[chunk % b.nslots]; }
  Phase& phase(uint64_t chunk) const { return slot(chunk).phases[chunk + 1 == chunks][phase_]; }

  // A lower bound of the progress of the other ranks, or of the other carriers, refreshed where it stands in the way.
  bool all(uint64_t& known, Signal RankCtl::* s, uint64_t need, uint32_t ranks) const {
    if (known >= need) return true;
    known = kNever;
    for (uint32_t r = 0; r < ranks; ++r)
      if (r != me) known = std::min(known, (g.ctl(r).*s).value.load(std::memory_order_acquire));
    return known >= need;
  }

  bool fill_all() {
    bool moved = false;
    for (; filled < blocks; moved = true) {
      // What an earlier call left in the slot has been drained; what this one did, taken.
      if (filled < window && base + filled >= window && !all(all_out, &RankCtl::out, base + filled + 1 - window, n))
        break;
      if (filled >= window && !all(all_took, &RankCtl::took, taken_base + filled + 1 - window, b.carriers)) break;
      for (uint32_t p = 0; p < b.carriers; ++p) {
        if (p == me) continue;
        const Range r = piece(filled, p);
        g.copy_in(ring(me, filled, p), c.in(0) + r.at, r.bytes);
      }
      g.advance(mine.in, base + ++filled);
    }
    return moved;
  }

  bool take_all() {
    bool moved = false;
    for (; took < blocks; moved = true) {
      const uint64_t chunk = took / pieces;
      if (chunk >= b.nslots && (arrived <= chunk - b.nslots || placed < (chunk - b.nslots + 1) * pieces)) break;
      if (filled <= took || !all(all_in, &RankCtl::in, base + took + 1, n)) break;
      if ((took + 1) % pieces == 0 && has_come(b.failure_news)) break;  // its transfers would start
      const Range r = piece(took, me);
      if (r.bytes) {
        for (uint32_t i = 0; i < n; ++i) src[i] = i == me ? c.in(0) + r.at : ring(i, took, me);
        inside(slot(chunk).mine + offset(took), src.data(), n, r.bytes / c.args.item_bytes, c.factors());
      }
      g.advance(mine.took, taken_base + ++took);
      if (!drains) g.advance(mine.out, base + took);
      if (took % pieces == 0 && !start(chunk)) return false;
    }
    return moved;
  }

  bool start(uint64_t chunk) {
    started = chunk + 1;
    return start(slot(chunk).phases[chunk + 1 == chunks][0]);
  }

  // Not once the deadline has passed or the group has ended, as where this process was stopped for long: the peers may
  // have gone, and MPICH 5 falls over a persistent request whose send fails at once.
  bool start(const Phase& phase) {
    if (late(now_ns())) return false;
    if (const Status st = g.health(c.number); st != kOk) return failed_ = true, c.fails(st, -1);
    if (phase.n) transfer_begins();
    if (phase.n && b.startall(int(phase.n), phase.requests)) return b.end = kTransfer, false;
    return true;
  }

  // Looks at the transfers of the oldest chunk under way.
  bool go_on() {
    if (arrived == started || b.end) return false;
    if (b.hosts > 2 && phase_ == 0 && has_come(b.failure_news)) return false;
    const Phase& ph = phase(arrived);
    int done = 1;
    if (ph.n) mpi_is_called();
    if (ph.n && b.testall(int(ph.n), ph.requests, &done, b.statuses)) return b.end = kTransfer, false;
    if (!done) return false;
    if (b.hosts > 2 && phase_ == 0) {
      const Range share = this->share(arrived);
      char* const to = slot(arrived).mine + share.at;
      if (share.bytes) combine(to, slot(arrived), to, 0, share.bytes);
      phase_ = 1;
      return start(phase(arrived));
    }
    phase_ = 0;
    ++arrived;
    return true;
  }

  // What the hosts have given, in order: `own` here, and the others' from `offset`.
  void combine(char* to, const PipelinedSlot& from, const char* own, uint64_t offset, uint64_t bytes) {
    for (uint32_t h = 0; h < b.hosts; ++h) src[h] = h == b.own ? own : from.theirs[h] + offset;
    between(to, src.data(), b.hosts, bytes / c.args.item_bytes, b.factor);
  }

  // Of this rank's part of a chunk: what this host sums, where there are more than two.
  Range share(uint64_t chunk) const {
    const uint64_t size = part(chunk, me).bytes, lines = (size + 63) / 64;
    const uint64_t lo = std::min(size, lines * b.own / b.hosts * 64),
                   hi = std::min(size, lines * (b.own + 1) / b.hosts * 64);
    return {lo, hi - lo};
  }

  bool place_all() {
    bool moved = false;
    for (; placed < blocks && placed < arrived * pieces; moved = true) {
      if (base + placed >= window && !all(all_out, &RankCtl::out, base + placed + 1 - window, n)) break;
      const Range r = piece(placed, me);
      if (r.bytes) {
        const PipelinedSlot& from = slot(placed / pieces);
        char* const own = drains ? c.out(0) + r.at : nullptr;
        char* const to = n == 1 && own ? own : ring(me, placed, me);
        if (b.hosts > 2) {
          memcpy(to, from.mine + offset(placed), r.bytes);
        } else {
          combine(to, from, from.mine + offset(placed), offset(placed), r.bytes);
        }
        if (own && own != to) memcpy(own, to, r.bytes);
      }
      g.advance(mine.red, base + ++placed);
    }
    return moved;
  }

  bool drain_all() {
    bool moved = false;
    for (; drained < blocks && drained < placed; moved = true) {
      if (!all(all_red, &RankCtl::red, base + drained + 1, b.carriers)) break;
      for (uint32_t p = 0; p < b.carriers; ++p) {
        if (p == me) continue;
        const Range r = piece(drained, p);
        memcpy(c.out(0) + r.at, ring(p, drained, p), r.bytes);
      }
      g.advance(mine.out, base + ++drained);
    }
    return moved;
  }

  bool over() const {
    return filled == blocks && took == blocks && placed == blocks && drained == blocks &&
           (!carrier || arrived == chunks);
  }

  // A moment's rest. False, and recorded, if there is nothing to wait for any more.
  bool idle(int64_t since) {
    const int64_t now = now_ns();
    const bool awaits = arrived < started;
    if (now - looked_ > kSliceOverMpi) {
      looked_ = now;
      if (!look(now, awaits)) return false;
    }
    if (!awaits && g.elsewhere) g.elsewhere(g.elsewhere_context);
    rest_between_looks(now - since, awake_amid_transfers(g.spinner.awake_ns));
    return true;
  }

  bool look(int64_t now, bool awaits) {
    if (const Status st = g.health(c.number); st != kOk) return c.fails(st, -1);
    for (uint32_t r = 0; r < n; ++r)
      if (r != me && g.gone(r) && !done(r)) return c.fails(kPeerLost, int32_t(r));
    if (g.interrupted && main_thread() && now - polled_ > kPollInterrupt) {
      polled_ = now;
      if (g.interrupted()) return c.fails(kInterrupted, -1);
    }
    if (awaits) {
      b.slot = uint32_t(arrived % b.nslots);
      if (b.look && b.look()) b.end = kLooked;
      return !(b.end || late(now)) || c.give_up();
    }
    return now < c.deadline || c.fails(kTimeout, int32_t(c.straggler(me)));
  }

  // Whether the deadline has passed with transfers under way.
  bool late(int64_t now) {
    if (arrived == started || now < c.deadline - b.later_ns) return false;
    b.slot = uint32_t(arrived % b.nslots);
    b.end = kLate;
    return true;
  }

  // Whether a rank has done all that this one may still wait for.
  bool done(uint32_t r) const {
    const RankCtl& ctl = g.ctl(r);
    auto at = [](const Signal& s) { return s.value.load(std::memory_order_acquire); };
    return at(ctl.in) >= base + blocks && at(ctl.out) >= base + blocks &&
           (r >= b.carriers || ((!b.keeps || at(ctl.red) >= base + blocks) && at(ctl.took) >= taken_base + blocks));
  }

  Collective& c;
  Group& g;
  PipelinedReduce& b;
  RankCtl& mine;
  const uint32_t me, n;
  const uint64_t window, base, taken_base, total;
  const uint64_t room;  // bytes of a ring's block for each carrier
  const uint64_t chunks;
  const bool carrier, drains;
  const ReduceFn inside, between;
  std::vector<const void*> src;
  uint64_t pieces = 0;  // of a part, at most
  uint64_t blocks = 0;
  uint64_t filled = 0, took = 0, placed = 0, drained = 0;  // blocks
  uint64_t started = 0, arrived = 0;                       // chunks: their transfers
  uint32_t phase_ = 0;                                     // of chunk `arrived`
  uint64_t all_in = 0, all_took = 0, all_red = 0, all_out = 0;
  int64_t looked_ = 0, polled_ = now_ns();
  bool failed_ = false;  // and it is recorded
};

}  // namespace

bool pipelined_ok(const Collective& c) {
  const CallArgs& a = c.args;
  const PipelinedReduce& b = *a.pipelined;
  return (a.op == kAllReduce || a.op == kReduce) && a.nin == 1 && a.nout <= 1 &&
         (!a.nout || c.out_bytes(0) == c.in_bytes(0)) && a.item_bytes && 64 % a.item_bytes == 0 && c.kernel() &&
         reduce_kernel(a.dtype, b.op) && b.carriers && b.carriers <= c.n && b.chunk && b.chunk % 64 == 0 &&
         c.g.geometry.block_bytes / b.carriers >= 64 && b.hosts && b.own < b.hosts &&
         (b.slots ? b.nslots && c.me < b.carriers : c.me >= b.carriers || !c.in_bytes(0));
}

bool ring_pipelined_reduce(Collective& c) { return PipelinedRun(c).run(); }

}  // namespace c10d_custom
