// The ring engine: blocks flow through three stages on every rank, as far ahead of each other as the rings have room.
// The stages, and the signal that tells of each:
//
//   fill    copy my input's block k into my ring                      -> signal `in`
//   reduce  combine my part of block k of every ring, in my ring      -> signal `red`
//   drain   copy block k of the rings to my output                    -> signal `out`
//
// An operation without a reduce stage passes NoReduce; drain then needs only that all have filled.
// Block k of every rank lives in slot k mod window, and may be overwritten once every rank has
// drained it. A rank runs as far ahead as the window lets it and sleeps only when no stage can move.
//
// Waiting for more than the next block ("worth") cannot deadlock. A rank asks a peer only for
// blocks that the peer can finish by itself:
//   - drained < reduced: asks for red up to its own red: it could reduce those blocks, so all ranks have filled them,
//     and each can reduce them unaided;
//   - reduced < filled:  asks for in within a window of its own out, which is open for the peer as
//     soon as the others have drained what is there;
//   - filled = drained:  asks for out up to its own in: every rank has filled and reduced those blocks, so each can
//     drain them unaided.
#pragma once
#include <algorithm>
#include <type_traits>

#include "collective.h"

namespace c10d_custom {

struct NoReduce {
  void operator()(uint64_t) const {}
};

struct AsCounted {
  uint64_t operator()(uint64_t blocks) const { return blocks; }
};

// A rank with nothing to fill (or drain) passes fills = false (drains = false). `recount`: how many blocks there are,
// as all ranks know once they have agreed; not fewer than this rank has counted before.
template <class Fill, class Red, class Drain, class Recount = AsCounted>
bool pipeline(Collective& c, uint64_t blocks, bool fills, bool drains, Fill fill, Red reduce, Drain drain,
              Recount recount = {}) {
  constexpr bool kReduces = !std::is_same_v<Red, NoReduce>;
  Group& g = c.g;
  RankCtl& mine = g.ctl(c.me);
  const uint64_t base = g.blocks_done, window = g.geometry.window;
  const uint64_t batch = window / 2;  // what a sleeper likes to find when it wakes
  uint64_t filled = 0, reduced = 0, drained = 0;
  // Lower bounds of the peers' progress, refreshed only when they stand in the way.
  uint64_t all_in = 0, all_red = 0, all_out = 0;
  auto slowest = [&](Signal RankCtl::* s, uint64_t enough, uint32_t* who) {
    uint64_t low = kNever;
    for (uint32_t r = 0; r < c.n; ++r) {
      if (r == c.me) continue;
      const uint64_t v = (g.ctl(r).*s).value.load(std::memory_order_acquire);
      if (v < low) low = v, *who = r;
      if (low < enough) break;
    }
    return low;
  };
  uint32_t who_in = 0, who_red = 0, who_out = 0;
  auto may_fill = [&] {
    if (filled >= blocks) return false;
    // Our own stages must be through with the slot, too: when only the root drains, the others'
    // `out` says nothing of our part.
    const uint64_t done = kReduces ? std::min(reduced, drained) : drained;
    if (filled >= done + window) return false;
    if (base + filled < window) return true;
    const uint64_t need = base + filled + 1 - window;
    if (all_out < need) all_out = slowest(&RankCtl::out, need, &who_out);
    return all_out >= need;
  };
  auto fill_all = [&] {
    bool moved = false;
    while (may_fill()) {
      fill(filled);
      g.advance(mine.in, base + ++filled);
      moved = true;
    }
    return moved;
  };

  if (fills && !c.has_memory(&Group::reserve_ring)) return false;
  c.announce_once();
  if (!fills)
    g.advance(mine.in, base + (filled = blocks));
  else
    fill_all();
  if (!c.agree_once()) return false;
  if (const uint64_t counted = recount(blocks); counted != blocks) {
    blocks = counted;
    if (!fills) g.advance(mine.in, base + (filled = blocks));
  }
  if (!drains) {
    drained = blocks;
    if (!kReduces) g.advance(mine.out, base + blocks);
  }

  for (;;) {
    bool moved = false;
    if (kReduces) {
      while (reduced < filled) {
        if (all_in < base + reduced + 1) all_in = slowest(&RankCtl::in, base + reduced + 1, &who_in);
        if (all_in < base + reduced + 1) break;
        reduce(reduced);
        g.advance(mine.red, base + ++reduced);
        if (!drains) g.advance(mine.out, base + reduced);
        moved = true;
      }
    } else {
      if (drained < filled && all_in < base + drained + 1) all_in = slowest(&RankCtl::in, base + drained + 1, &who_in);
      reduced = std::min(filled, all_in > base ? all_in - base : 0);
    }
    while (drained < reduced) {
      if (kReduces) {
        if (all_red < base + drained + 1) all_red = slowest(&RankCtl::red, base + drained + 1, &who_red);
        if (all_red < base + drained + 1) break;
      }
      drain(drained);
      g.advance(mine.out, base + ++drained);
      moved = true;
    }
    if (fill_all()) moved = true;
    if (filled == blocks && drained == blocks && (!kReduces || reduced == blocks)) break;
    // Else the deadline is looked at in waits only. With much data, or if a peer's counters are wrong, there may be
    // none.
    if (moved && !c.may_go_on(who_out)) return false;
    if (moved) continue;

    bool ok;
    if (kReduces && drains && drained < reduced) {
      ok = c.wait(g.ctl(who_red).red, base + drained + 1, base + std::min(reduced, drained + batch), who_red);
    } else if (const uint64_t ready = kReduces ? reduced : drained; ready < filled) {
      ok = c.wait(g.ctl(who_in).in, base + ready + 1, base + std::min(filled, ready + batch), who_in);
    } else {
      ok = c.wait(g.ctl(who_out).out, base + filled + 1 - window, base + filled + batch - window, who_out);
    }
    if (!ok) return false;
  }
  if (!kReduces) g.advance(mine.red, base + blocks);
  g.blocks_done = base + blocks;
  return true;
}

}  // namespace c10d_custom
