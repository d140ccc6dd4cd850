// Collectives whose inputs lie in their ranks' arenas: they are read there, and all_reduce writes there, too.
//
//   all_reduce      each rank reduces its part of all inputs, and writes the result to all of them. What a part is read
//                   from and written to, no other rank touches.
//   reduce_scatter  each rank reduces what is for it, out of all inputs, to its output.
//   all_gather      each rank copies the others' inputs to its outputs.
//
// A rank is done once all are: until then its input is read, and its part of the others' is not yet written.
//
// A rank that leaves with an error first tells the group (its poison), then takes its block from those who are still in
// the call, unless they are out in a moment: in_place of their RankCtl. What they read there afterwards is not what was
// there; so nobody is done before it has looked at the poison after its last read, and none of these calls succeeds.
#include "collective.h"

namespace c10d_custom {

// Where this call's input begins in this rank's arena, as it announces it; 0 if the call is not one for this file.
uint64_t Collective::own_place() { return worth_in_place() ? g.arenas.place(in(0), input_bytes()) : 0; }

// Whether all have announced such a place; the same answer on every rank.
bool Collective::all_placed() {
  bool all = true;
  placed_.assign(n, in(0));
  for (uint32_t r = 0; r < n; ++r) {
    if (r == me) continue;
    const uint64_t place = g.ctl(r).fingerprint[seq & 1].place;
    placed_[r] = g.arenas.at(r, place, args.op == kAllGather ? out_bytes(r) : input_bytes());
    all = all && placed_[r];
  }
  return all;
}

namespace {

constexpr uint64_t kBlock =
    32 << 10;                        // of each rank at once: the inputs' are in the near caches while they are written
constexpr uint64_t kLook = 1 << 20;  // bytes between two looks at the deadline and at the group
constexpr int64_t kPatience =
    200 * 1000 * 1000;  // ns: a peer that stays in a failed call for longer is taken to be stopped

class InPlace {
 public:
  explicit InPlace(Collective& call) : c(call), me(c.me), n(c.n), src(n) {}

  bool run() {
    const bool done = still_well() && move_and_meet();
    c.g.ctl(me).in_place.store(0, std::memory_order_release);
    return done;
  }

 private:
  bool move_and_meet() {
    const bool moved = c.args.op == kAllReduce   ? all_reduce()
                       : c.args.op == kAllGather ? all_gather()
                                                 : reduce_scatter();
    return moved && still_well() && c.meet();
  }

  // Says that this rank reaches into the others' arenas, and then looks at the poison: see part_from_peers. An
  // exchange, for what was read before must have been read by then.
  bool still_well() {
    c.g.ctl(me).in_place.exchange(c.seq, std::memory_order_seq_cst);
    return c.all_go_on(first_peer());
  }

  uint32_t first_peer() const { return me ? 0 : 1; }

  bool all_reduce() {
    const uint64_t total = c.in_bytes(0), lines = (total + 63) / 64;
    const uint64_t end = std::min(total, lines * (me + 1) / n * 64);
    char* const own = c.placed(me);
    for (uint64_t at = lines * me / n * 64; at < end; at += kBlock) {
      const uint64_t size = std::min(kBlock, end - at);
      reduce(own + at, at, size);
      for (uint32_t r = 0; r < n; ++r)
        if (r != me) memcpy(c.placed(r) + at, own + at, size);
      if (!may_go_on(size)) return false;
    }
    return true;
  }

  bool reduce_scatter() {
    uint64_t begin = 0;
    for (uint32_t r = 0; r < me; ++r) begin += c.in_bytes(r);
    const uint64_t total = c.out_bytes(0);
    for (uint64_t at = 0; at < total; at += kBlock) {
      const uint64_t size = std::min(kBlock, total - at);
      reduce(c.out(0) + at, begin + at, size);
      if (!may_go_on(size)) return false;
    }
    return true;
  }

  bool all_gather() {
    uint64_t sum = 0;
    for (uint32_t r = 0; r < n; ++r) sum += c.out_bytes(r);
    const CopyOut copy(sum * (n + 1));
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t r = (me + i) % n;  // no two from the same rank
      const uint64_t total = c.out_bytes(r);
      if (c.out(r) == c.placed(r)) continue;
      for (uint64_t at = 0; at < total; at += kLook) {
        const uint64_t size = std::min(kLook, total - at);
        copy(c.out(r) + at, c.placed(r) + at, size);
        if (!may_go_on(size)) return false;
      }
    }
    return true;
  }

  void reduce(char* to, uint64_t at, uint64_t size) {
    for (uint32_t r = 0; r < n; ++r) src[r] = c.placed(r) + at;
    c.kernel()(to, src.data(), n, size / c.args.item_bytes, c.factors());
  }

  bool may_go_on(uint64_t bytes) {
    if ((since_ += bytes) < kLook) return true;
    since_ = 0;
    return c.all_go_on(first_peer());
  }

  Collective& c;
  const uint32_t me, n;
  std::vector<const void*> src;
  uint64_t since_ = 0;
};

}  // namespace

bool in_place(Collective& c) { return InPlace(c).run(); }

void Collective::part_from_peers() {
  // Who has not begun to reach into arenas sees why the group is of no more use, and does not begin.
  Failure why{};
  if (!g.poisoned(&why, number)) g.poison(g.left(me) ? kPeerLost : kAborted, int32_t(me), number);
  auto reaches = [this](uint32_t r) {
    return r != me && g.ctl(r).in_place.load(std::memory_order_seq_cst) == seq && g.alive(r);
  };
  const int64_t until = now_ns() + kPatience;
  for (uint32_t r = 0; r < n; ++r)
    while (reaches(r)) {
      if (now_ns() >= until) return g.arenas.cut_off(in(0));
      rest_between_rare_looks();
    }
}

}  // namespace c10d_custom
