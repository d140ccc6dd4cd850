#include "collective.h"

#include <errno.h>

#include <algorithm>

namespace c10d_custom {

Collective::Collective(Group& group, uint64_t s, const CallArgs& a, int64_t started, Failure* f)
    : g(group),
      me(group.rank),
      n(group.n),
      seq(s),
      args(a),
      number(a.number ? a.number : s),
      deadline(deadline_after(started, a.timeout_ns)),
      started_(started),
      failure_(f) {}

Status Collective::fail(Status st, int32_t peer) {
  *failure_ = Failure{};
  failure_->peer = peer;
  failure_->by = -1;
  failure_->call = failure_->seq = number;
  if (st == kBroken || st == kAborted)
    g.poisoned(failure_, number);
  else if (st == kInterrupted)
    g.poison(kInterrupted, int32_t(me), number);
  else if (st != kUsage)
    g.poison(st, peer, number);
  failure_->status = st;
  failure_->elapsed_ns = now_ns() - started_;
  return status_ = st;
}

bool Collective::wait(Signal& s, uint64_t need, uint64_t worth, uint32_t peer) {
  const Status st = g.wait(s, need, worth, &peer, deadline);
  return waited(st, peer);
}

bool Collective::wait(Wait& w, bool yields, uint32_t peer) {
  const Status st = g.wait(w, yields, &peer, deadline);
  return waited_to_agree(st, peer);
}

bool Collective::waited(Status st, uint32_t peer) {
  return st == kOk || fails(st, int32_t(st == kTimeout ? straggler(peer) : peer));
}

bool Collective::disagrees(Status st, uint32_t peer) {
  Failure why{};
  if (st != kBroken || !g.poisoned(&why, number) || why.cause != kMismatch || why.seq != number || why.by < 0 ||
      uint32_t(why.by) >= n || uint32_t(why.by) == me)
    return waited(st, peer);
  return mismatch(uint32_t(why.by)), false;
}

bool Collective::has_memory(int (Group::*reserve)(const GoesOn&)) {
  const int error = (g.*reserve)([this] { return may_go_on(me); });
  if (!error) return true;
  if (error == ECANCELED) return false;
  g.poison(kExhausted, int32_t(me), number, error);
  fail(kExhausted, int32_t(me));
  failure_->actual = uint64_t(error);
  return false;
}

uint32_t Collective::straggler(uint32_t peer) const {
  uint64_t least = kNever;
  for (uint32_t r = 0; r < n; ++r) {
    if (r == me) continue;
    const RankCtl& c = g.ctl(r);
    if (c.arrive.value.load(std::memory_order_acquire) < seq) return r;
    uint64_t done = c.progress.load(std::memory_order_relaxed);
    done += c.rounds.load(std::memory_order_relaxed);
    for (const Signal* s : {&c.in, &c.red, &c.out}) done += s->value.load(std::memory_order_acquire);
    if (done < least) least = done, peer = r;
  }
  return peer;
}

bool Collective::may_go_on(uint32_t peer) {
  // Not whether the group has failed: who finds that ranks disagree waits for what the others have called.
  if (g.aborted()) return fail(kAborted, -1), false;
  if (now_ns() < deadline) return true;
  const Status st = g.health(number);  // see Group::sleep
  return fail(st != kOk ? st : kTimeout, int32_t(straggler(peer))), false;
}

bool Collective::all_go_on(uint32_t peer) {
  const Status st = g.health(number);
  return st == kOk ? may_go_on(peer) : (fail(st, int32_t(straggler(peer))), false);
}

const double* Collective::factors() {
  if (args.redop == kAvg) return args.factor ? &args.factor : nullptr;
  if (args.redop != kPremulSum) return nullptr;
  double* f = factors_;
  if (n > 64) {
    many_factors_ = std::make_unique<double[]>(n);
    f = many_factors_.get();
  }
  for (uint32_t r = 0; r < n; ++r) f[r] = r == me ? args.factor : g.ctl(r).fingerprint[seq & 1].factor;
  return f;
}

void Collective::announce() {
  RankCtl& mine = g.ctl(me);
  Fingerprint& f = runs_ahead() ? mine.ahead[seq % kCallsAhead] : mine.fingerprint[seq & 1];
  f.seq = seq;
  f.op = args.op;
  f.redop = args.redop;
  f.dtype = args.dtype;
  f.root = args.root;
  f.count = args.count;
  f.device = memory_of(args) == kHost ? 0 : 1 + args.device / kMemories;
  f.factor = args.factor;
  f.outer = args.outer;
  f.place = args.op == kAllToAll ? input_bytes() : place_;
  if (uses_table()) {
    uint64_t* t = g.table(me, seq);
    auto part = [](const Span* spans, uint32_t have, uint32_t i) {
      return have == 1 ? spans[0].bytes : i < have ? spans[i].bytes : 0;
    };
    uint64_t begin = 0;
    for (uint32_t i = 0; i < n; ++i) {
      t[i] = part(args.in, args.nin, i);
      t[n + i] = part(args.out, args.nout, i);
      t[2 * n + i] = begin;
      begin += t[i];
    }
  }
  enter();
}

void Collective::enter() {
  announced_ = true;
  // Calls that say more in their tables are looked at by all.
  if (g.tree.in_use() && !runs_ahead())
    g.come(uses_table(), [this](uint32_t r) { return differs(r) || counts_differ(r); });
  g.advance(g.ctl(me).arrive, seq);
}

bool Collective::counts_differ(uint32_t peer) const {
  return g.ctl(me).fingerprint[seq & 1].count != g.ctl(peer).fingerprint[seq & 1].count;
}

const Fingerprint& Collective::said(uint32_t rank) const {
  const RankCtl& c = g.ctl(rank);
  return g.has_run_ahead && c.ahead[seq % kCallsAhead].seq == seq ? c.ahead[seq % kCallsAhead] : c.fingerprint[seq & 1];
}

bool Collective::differ(const Fingerprint& a, const Fingerprint& b) const {
  return a.seq != b.seq || a.op != b.op || a.redop != b.redop || a.dtype != b.dtype || a.root != b.root ||
         a.device != b.device || a.outer != b.outer || (!has_parts_at_root() && a.count != b.count);
}

bool Collective::parts_differ(uint32_t peer) const {
  if (has_parts_at_root())
    return uneven_ && ((is_root() && !fits_root(peer)) || (int32_t(peer) == args.root && !fits_root(me)));
  if (!uses_table()) return false;
  const uint64_t *mine = g.table(me, seq), *theirs = g.table(peer, seq);
  if (args.op == kReduceScatter)  // every rank must cut its input alike
    return !std::equal(mine, mine + n, theirs);
  return !parts_fit(me, peer);
}

bool Collective::parts_fit(uint32_t a, uint32_t b) const {
  const uint64_t *of_a = g.table(a, seq), *of_b = g.table(b, seq);
  return of_a[b] == of_b[n + a] && of_b[a] == of_a[n + b];
}

uint64_t Collective::part(uint32_t r) const {
  const uint64_t count = g.ctl(r).fingerprint[seq & 1].count;
  return count == kNever ? g.table(r, seq)[args.op == kGather ? args.root : int32_t(n) + args.root]
                         : count * args.item_bytes;
}

bool Collective::fits_root(uint32_t r) const {
  const uint32_t root = uint32_t(args.root);
  const uint64_t count = g.ctl(root).fingerprint[seq & 1].count;
  if (count != kNever) return g.ctl(r).fingerprint[seq & 1].count == count;
  return g.table(root, seq)[args.op == kGather ? n + r : r] == part(r);
}

uint64_t Collective::longest_part(uint64_t own) const {
  if (uneven_)
    for (uint32_t r = 0; r < n; ++r) own = std::max(own, part(r));
  return own;
}

Status Collective::mismatch(uint32_t peer) {
  g.poison(kMismatch, int32_t(peer), number);
  // The others' fingerprints belong into everyone's error message: give stragglers a moment.
  const int64_t until = std::min(deadline, deadline_after(now_ns(), 900 * 1000 * 1000));
  for (uint32_t r = 0; r < n; ++r)
    while (g.ctl(r).arrive.value.load(std::memory_order_acquire) < seq && now_ns() < until && g.alive(r) &&
           !g.left(r) && !g.aborted())
      rest_between_rare_looks();
  // If `peer`, which another rank has named, has called the same as this one, a rank that differs is named instead.
  for (uint32_t r = 0; r < n && !differs(peer); ++r)
    if (r != me && g.ctl(r).arrive.value.load(std::memory_order_acquire) >= seq && differs(r)) peer = r;
  return fail(kMismatch, int32_t(peer));
}

bool Collective::agree() {
  agreed_ = g.tree.in_use() ? agree_by_tree() : agree_in_pairs();
  if (agreed_) g.see_who_shares_cores();
  return agreed_;
}

bool Collective::agree_in_pairs() {
  const bool parts_at_root = has_parts_at_root(), has_parts = uses_table() || parts_at_root;
  const Fingerprint& mine = said(me);
  for (uint32_t r = 0; r < n; ++r) {
    if (r == me) continue;
    uint32_t peer = r;
    const Status st = g.wait(g.ctl(r).arrive, seq, seq, &peer, deadline, {seq, 0});
    if (!waited_to_agree(st, peer)) return false;
    uneven_ = uneven_ || (parts_at_root && (uses_table() || counts_differ(r)));
    if (differ(mine, said(r)) || (has_parts && parts_differ(r))) return mismatch(r), false;
  }
  return !has_parts || all_parts_fit();
}

// Of many ranks. Where their counters do not say that all calls are alike, each looks at all others, and then tells
// them by a second round what came of it: parts that two of them do not agree on are every rank's error, before any has
// written a result.
bool Collective::agree_by_tree() {
  bool flag;
  // The tree answers only once all have come. So a sleeper compares itself with those that have, whenever it looks up,
  // and a difference is found however late the rest are.
  auto found = [](const void* context, uint32_t* peer) {
    const auto& c = *static_cast<const Collective*>(context);
    for (uint32_t r = 0; r < c.n; ++r)
      if (r != c.me && c.g.ctl(r).arrive.value.load(std::memory_order_acquire) >= c.seq && c.differs(r))
        return *peer = r, true;
    return false;
  };
  uint32_t peer;
  const Status st = g.wait_for_all(&flag, &peer, deadline, found, this);
  if (st == kPeerLost && found(this, &peer)) return mismatch(peer), false;
  if (!waited_to_agree(st, peer)) return false;
  if (!flag) return true;
  for (uint32_t r = 0; r < n; ++r)
    if (r != me && differs(r)) return mismatch(r), false;
  for (uint32_t r = 0; r < n && has_parts_at_root(); ++r) uneven_ = uneven_ || uses_table() || counts_differ(r);
  bool fit = true;
  const uint32_t looked_at = args.op == kReduceScatter ? 1 : n;  // who cuts as rank 0 does cuts as all do
  for (uint32_t r = 0; r < looked_at && fit; ++r) fit = r == me || !parts_differ(r);
  g.come(!fit, [](uint32_t) { return false; });
  if (!all_come(&flag)) return false;
  if (!flag) return true;
  for (uint32_t r = 0; r < n; ++r)
    if (r != me && parts_differ(r)) return mismatch(r), false;
  return all_parts_fit();
}

bool Collective::all_come(bool* flag) {
  uint32_t peer;
  const Status st = g.wait_for_all(flag, &peer, deadline);
  return waited_to_agree(st, peer);
}

// All other fields must be equal on all ranks, so comparing each rank with this one finds any difference. Parts need
// not be equal: they can fit between this rank and every other, and yet not between two others. So all pairs are
// checked.
bool Collective::all_parts_fit() {
  if (uneven_) {
    for (uint32_t r = 0; r < n; ++r)
      if (!fits_root(r)) return mismatch(r), false;
  } else if (uses_table() && args.op != kReduceScatter && !has_parts_at_root()) {
    for (uint32_t a = 0; a < n; ++a)
      for (uint32_t b = a + 1; b < n; ++b)
        if (!parts_fit(a, b)) return mismatch(a), false;
  }
  return true;
}

bool Collective::meet() {
  if (g.tree.in_use()) {
    bool flag;
    g.come(false, [](uint32_t) { return false; });
    return all_come(&flag);
  }
  RankCtl& mine = g.ctl(me);
  const uint64_t done = ++g.blocks_done;
  g.advance(mine.in, done);
  g.advance(mine.out, done);
  g.advance(mine.red, done);
  for (uint32_t r = 0; r < n; ++r)
    if (r != me && !wait(g.ctl(r).red, done, done, r)) return false;
  return true;
}

bool Collective::memory_ok() const {
  if (on_device()) return true;
  auto there = [](const Span* spans, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i)
      if (!spans[i].data && spans[i].bytes) return false;
    return true;
  };
  return there(args.in, args.nin) && there(args.out, args.nout);
}

Status Collective::refuse() {
  g.last_call_waited = false;
  RankCtl& mine = g.ctl(me);
  Fingerprint& f = mine.fingerprint[seq & 1];
  f.seq = seq, f.op = kRejected, f.outer = args.outer;
  enter();
  return fail(kUsage, -1);
}

bool Collective::shape_ok() const {
  if (!memory_ok()) return false;
  auto root_only = [&](uint32_t want, uint32_t have) { return is_root() ? have == want : true; };
  auto equal = [&](const Span* spans, uint64_t bytes) {
    return uses_table() ? spans[me].bytes == bytes
                        : std::all_of(spans, spans + n, [&](const Span& s) { return s.bytes == bytes; });
  };
  const bool rooted = args.op == kBroadcast || args.op == kReduce || args.op == kGather || args.op == kScatter;
  if (rooted && (args.root < 0 || uint32_t(args.root) >= n)) return false;
  if (args.item_bytes == 0 || args.item_bytes > 64 || 64 % args.item_bytes) return false;
  switch (args.op) {
    case kBarrier:
    case kMonitoredBarrier: return true;
    case kBroadcast: return is_root() ? args.nin == 1 : args.nout == 1;
    case kAllReduce: return args.nin == 1 && args.nout == 1 && in_bytes(0) == out_bytes(0) && kernel();
    case kReduce:
      return args.nin == 1 && root_only(1, args.nout) && (!is_root() || in_bytes(0) == out_bytes(0)) && kernel();
    case kAllGather: return args.nin == 1 && args.nout == n && in_bytes(0) == out_bytes(me);
    case kReduceScatter: return args.nin == n && args.nout == 1 && in_bytes(me) == out_bytes(0) && kernel();
    case kAllToAll: return args.nin == n && args.nout == n && uses_table() && in_bytes(me) == out_bytes(me);
    case kGather: return args.nin == 1 && root_only(n, args.nout) && (!is_root() || equal(args.out, in_bytes(0)));
    case kScatter: return args.nout == 1 && root_only(n, args.nin) && (!is_root() || equal(args.in, out_bytes(0)));
  }
  return false;
}

bool Collective::healthy() {
  Failure why{};
  const Status st = g.health(number);
  if (st == kOk) return true;
  const bool about_us = st == kBroken && g.poisoned(&why, number) && why.cause == kMismatch && why.seq == number;
  return about_us || fails(st, -1);
}

bool Collective::announce_early() {
  if (!g.last_call_waited || g.health(number) != kOk) return false;
  if (!g.has_slots() && needs_slots() && g.reserve_slots({})) return false;  // `run` says so
  announce_small();
  return true;
}

Status Collective::go_on() {
  g.call = number;
  announced_ = true;
  if (healthy()) finish_small();
  return status_;
}

Status Collective::run() {
  g.call = number;
  g.team.begin(std::max(input_bytes(), output_bytes()));
  if (!healthy()) return status_;
  // After a call that waited for nobody, a slower rank may still read the slots we are to write.
  if (!g.last_call_waited && !runs_ahead())
    for (uint32_t r = 0; r < n; ++r)
      if (r != me && !wait(g.ctl(r).arrive, seq - 1, seq - 1, r)) return status_;
  g.last_call_waited = args.op != kRejected && !runs_ahead();
  if (args.op == kRejected) return announce(), kOk;
  if (args.pipelined) {
    if (!pipelined_ok(*this) || !memory_ok()) return refuse();
    return ring_pipelined_reduce(*this) ? kOk : status_;
  }
  if (!shape_ok()) return refuse();
  if (!g.has_slots() && needs_slots() && !has_memory(&Group::reserve_slots)) return status_;
  if (runs_ahead()) return run_ahead() ? kOk : status_;
  if (on_device()) {
    announce();  // alone, too: the sizes and factors are read back from what was announced
    return agree() ? kOk : status_;
  }
  if (n == 1) return run_alone(), kOk;
  if (fits_small()) return announce_small(), finish_small(), status_;
  if (!(place_ = own_place())) return run_large() ? kOk : status_;
  announce();
  if (!agree() || !(all_placed() ? in_place(*this) : run_large())) part_from_peers();
  return status_;
}

// Of any two ranks at least one, having announced its call, sees what the other has announced.
bool Collective::run_ahead() {
  g.has_run_ahead = true;
  const uint64_t behind = seq - std::min<uint64_t>(seq, kCallsAhead - 1);
  for (uint32_t r = 0; r < n; ++r)
    if (r != me && !wait(g.ctl(r).arrive, behind, behind, r)) return false;
  announce();
  for (uint32_t r = 0; r < n; ++r) {
    if (r == me) continue;
    const bool left = g.left(r);  // before the look whether it came
    if (g.ctl(r).arrive.value.load(std::memory_order_seq_cst) < seq) {
      if (left) return fails(kPeerLost, int32_t(r));
    } else if (differs(r)) {
      return mismatch(r), false;
    }
  }
  return true;
}

bool Collective::run_large() {
  switch (args.op) {
    case kAllReduce:
    case kReduce: return ring_all_reduce(*this);
    case kBroadcast:
    case kAllGather: return ring_multicast(*this);
    case kAllToAll: return pair_rings_all_to_all(*this);
    case kReduceScatter:
    case kGather:
    case kScatter: return ring_scatter_gather(*this);
    default: return fails(kUsage, -1);
  }
}

void Collective::run_alone() {
  if (args.op == kBarrier || args.op == kBroadcast || args.nin == 0 || args.nout == 0) return;
  if (args.op == kAllReduce || args.op == kReduce || args.op == kReduceScatter) {
    const void* src = in(0);
    kernel()(out(0), &src, 1, in_bytes(0) / args.item_bytes, factors());
  } else if (in(0) != out(0)) {
    memmove(out(0), in(0), in_bytes(0));
  }
}

}  // namespace c10d_custom
