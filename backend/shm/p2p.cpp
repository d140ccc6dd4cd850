#include "p2p.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "copy_out.h"

namespace c10d_custom {
namespace {

// Short enough to copy twice rather than to ask first.
constexpr uint64_t kEagerLimit = 16 << 10;
// How long the helper leaves a new request to its issuer, who will most likely wait for it.
constexpr auto kHelperTick = std::chrono::microseconds(500);
constexpr int64_t kHelperLinger = 50 * 1000 * 1000;  // ns without a post before it sleeps for good

}  // namespace

Messenger::Messenger(Group& g) : g_(g), links_(g.n) {}

Messenger::~Messenger() {
  std::unique_lock<std::mutex> hold(mutex_);
  if (!closing_) fail_all(kAborted);
  closing_ = true;
  helper_cv_.notify_all();
  changed_.notify_all();
  changed_.wait(hold, [&] { return waiters_ == 0; });
  std::thread helper = std::move(helper_);
  hold.unlock();
  if (helper.joinable()) helper.join();
}

int Messenger::probe(int64_t tag) {
  std::lock_guard<std::mutex> hold(mutex_);
  if (closing_) return -1;
  progress();
  int found = -1;
  uint64_t first = kNever;
  for (uint32_t src = 0; src < g_.n; ++src)
    for (const Envelope& e : links_[src].unexpected)
      if (e.header.tag == tag && e.arrival < first) first = e.arrival, found = int(src);
  return found;
}

void Messenger::interrupt() {
  std::lock_guard<std::mutex> hold(mutex_);
  fail_all(kAborted);
}

void Messenger::keep_trace(uint32_t messages) {
  std::lock_guard<std::mutex> hold(mutex_);
  trace_.keep(messages);
}

void Messenger::trace(std::vector<TraceRecord>& out) {
  std::lock_guard<std::mutex> hold(mutex_);
  trace_.read(out);
  for (const Request* r : live_) out.push_back(trace_record(r->args, r->id, r->ticket->started, r->granted));
}

Ticket* Messenger::post(const MessageArgs& a) {
  std::unique_lock<std::mutex> hold(mutex_);
  const int64_t now = now_ns();
  auto* t = new Ticket(now);
  t->message = true;
  auto* r = new Request{t, a, next_id_++, deadline_after(now, a.timeout_ns)};
  live_.push_back(r);
  last_post_ = now;
  if (closing_ || g_.health() != kOk) {
    finish(r, g_.health() == kBroken ? kBroken : kAborted, -1);
    return t;
  }
  if (a.peer >= int64_t(g_.n) || a.peer < (a.is_recv ? -1 : 0)) {
    finish(r, kUsage, -1);
    return t;
  }
  if (a.is_recv) {
    if (!match_unexpected(r)) posted_.push_back(r);
  } else {
    const uint32_t dst = uint32_t(a.peer);
    if (!links_[dst].reserved) {
      if (const int error = g_.reserve_cells(dst)) return exhausted(r, error), t;
      links_[dst].reserved = true;
    }
    const bool eager = a.data.bytes <= std::min<uint64_t>(kEagerLimit, g_.geometry.cell_bytes);
    CellHeader h{eager ? kEager : kRequest, a.dtype, a.tag, r->id, a.data.bytes};
    if (!eager) links_[dst].offered[r->id] = r;
    links_[dst].outbox.push_back({h, eager ? r : nullptr});
  }
  progress();
  if (!live_.empty()) {
    if (!helper_.joinable()) {
      const int error = start_thread(helper_, [this] { help(); });
      if (error && std::find(live_.begin(), live_.end(), r) != live_.end()) exhausted(r, error);
    } else if (helper_idle_)
      helper_cv_.notify_all();
  }
  return t;
}

// This machine gave what the request needs neither memory nor a thread. Its peer would wait for it: the group ends.
void Messenger::exhausted(Request* r, int error) {
  Failure f{};
  f.actual = uint64_t(error);
  g_.poison(kExhausted, int32_t(g_.rank), 0);
  finish(r, kExhausted, r->args.peer, &f);
}

Status Messenger::withdraw(Ticket* t) {
  std::unique_lock<std::mutex> hold(mutex_);
  const auto it = std::find_if(live_.begin(), live_.end(), [&](const Request* r) { return r->ticket == t; });
  if (it == live_.end()) return kOk;
  Request* const r = *it;
  const bool send = !r->args.is_recv;
  // Who has granted a message must expect it at any moment.
  if (send ? r->moved > 0 : r->granted != 0) {
    hold.unlock();
    g_.abort();
    return kAborted;
  }
  const uint64_t id = r->id;
  const int32_t peer = r->args.peer;
  if (forget(r) && send) send_control(uint32_t(peer), kWithdraw, id);
  finish(r, kAborted, peer);
  progress();
  return kOk;
}

Status Messenger::wait(Ticket* t, int64_t timeout_ns) {
  if (t->state() != kPending) return t->state();
  const int64_t until = deadline_after(now_ns(), timeout_ns);
  std::unique_lock<std::mutex> hold(mutex_);
  ++waiters_;
  while (t->state() == kPending && !closing_) {
    const int64_t now = now_ns();
    if (now >= until) break;
    if (driving_) {
      // The driver may be the helper, asleep: it gives up its seat once it sees a waiter.
      Group::wake(g_.ctl(g_.rank).doorbell);
      changed_.wait_for(hold, std::chrono::nanoseconds(std::min(until - now, kSlice)));
      continue;
    }
    driving_ = true;
    while (t->state() == kPending && !closing_ && now_ns() < until) step(hold, until);
    driving_ = false;
  }
  --waiters_;
  changed_.notify_all();
  return t->state();
}

void Messenger::help() {
  std::unique_lock<std::mutex> hold(mutex_);
  while (!closing_) {
    if (live_.empty() && now_ns() - last_post_ > kHelperLinger) {
      helper_idle_ = true;
      helper_cv_.wait(hold, [&] { return closing_ || !live_.empty(); });
      helper_idle_ = false;
      continue;
    }
    helper_cv_.wait_for(hold, kHelperTick);
    if (driving_ || live_.empty()) continue;
    driving_ = true;
    while (!live_.empty() && !closing_ && waiters_ == 0) step(hold, INT64_MAX);
    driving_ = false;
    changed_.notify_all();
  }
}

void Messenger::step(std::unique_lock<std::mutex>& hold, int64_t until) {
  if (progress()) {
    if (now_ns() - last_check_ >= kSlice) check_faults();
    return;
  }
  hold.unlock();
  const bool moved = g_.spinner.spin(
      now_ns(), until,
      [&] {
        if (!anything_to_do()) return false;
        std::lock_guard<std::mutex> look(mutex_);
        return progress();
      },
      [] {});
  hold.lock();
  if (moved) return;
  Doorbell& doorbell = g_.ctl(g_.rank).doorbell;
  // In this order: who clears `sleeping` has not rung yet.
  const uint32_t rings = doorbell.rings.load(std::memory_order_seq_cst);
  doorbell.sleeping.store(1, std::memory_order_seq_cst);
  if (!progress() && !live_.empty()) {
    const int64_t ns = std::min(until - now_ns(), kSlice);
    hold.unlock();
    if (ns > 0) futex_wait(&doorbell.rings, rings, ns);
    hold.lock();
  }
  doorbell.sleeping.store(0, std::memory_order_relaxed);
  if (now_ns() - last_check_ >= kSlice) check_faults();
}

bool Messenger::progress() {
  bool moved = false, waits = false;
  for (uint32_t r = 0; r < g_.n; ++r) moved |= drain(r);
  for (uint32_t r = 0; r < g_.n; ++r) {
    moved |= flush(r);
    waits |= !links_[r].outbox.empty() || !links_[r].streams.empty();
  }
  outgoing_.store(waits, std::memory_order_relaxed);
  return moved;
}

bool Messenger::anything_to_do() const {
  for (uint32_t r = 0; r < g_.n; ++r) {
    const PairCtl& p = g_.pair(r, g_.rank);
    if (p.tail.load(std::memory_order_relaxed) != p.head.load(std::memory_order_relaxed)) return true;
  }
  return outgoing_.load(std::memory_order_relaxed);
}

void Messenger::finish(Request* r, Status st, int32_t peer, const Failure* detail) {
  Failure f{};
  f.by = -1;
  if (detail) f = *detail;
  f.peer = peer;
  if (st == kBroken) g_.poisoned(&f);
  f.status = st;
  const int64_t now = now_ns();
  f.elapsed_ns = now - r->ticket->started;
  Ticket* t = r->ticket;
  if (TraceRecord* record = trace_.begin(trace_record(r->args, r->id, t->started, r->granted))) {
    record->ended = now;
    record->status = st;
    if (r->args.is_recv && t->source >= 0) record->peer = t->source;
  }
  live_.erase(std::find(live_.begin(), live_.end(), r));
  delete r;
  t->finish(st, f, g_.queue().completed);
  t->drop();
  if (waiters_ > 1 || (waiters_ && !driving_)) changed_.notify_all();
}

// Takes a request out of wherever it stands. False: nothing of it is known to the peer.
bool Messenger::forget(Request* r) {
  posted_.remove(r);
  bool announced = false;
  for (uint32_t p = 0; p < g_.n; ++p) {
    Link& link = links_[p];
    bool unsent = false;
    for (auto it = link.outbox.begin(); it != link.outbox.end();) {
      const bool its = it->request == r || (it->header.kind == kRequest && it->header.message == r->id);
      unsent |= its;
      it = its ? link.outbox.erase(it) : std::next(it);
    }
    for (auto it = link.incoming.begin(); it != link.incoming.end();)
      it = it->second == r ? link.incoming.erase(it) : std::next(it);
    announced |= link.offered.erase(r->id) > 0 && !unsent;
    auto s = std::find(link.streams.begin(), link.streams.end(), r);
    if (s != link.streams.end()) link.streams.erase(s), announced = true;
  }
  return announced;
}

bool Messenger::lost(const Request& r, int32_t* who) {
  auto gone = [&](uint32_t p) {
    return p != g_.rank && (g_.left(p) || !g_.alive(p)) &&
           g_.pair(p, g_.rank).tail.load(std::memory_order_acquire) ==
               g_.pair(p, g_.rank).head.load(std::memory_order_relaxed);
  };
  if (r.args.peer >= 0) return gone(uint32_t(*who = r.args.peer));
  // Any source: somebody may still send, unless the message under way came from the one that died.
  for (uint32_t p = 0; p < g_.n; ++p) {
    if (p == g_.rank) continue;
    const bool from_here = std::any_of(links_[p].incoming.begin(), links_[p].incoming.end(),
                                       [&](const auto& e) { return e.second == &r; });
    if (from_here) return gone(uint32_t(*who = int32_t(p)));
  }
  int32_t last = -1;
  for (uint32_t p = 0; p < g_.n; ++p) {
    if (p == g_.rank) continue;
    if (!gone(p)) return false;
    // Of several, one that has died says more than one that has left.
    if (last < 0 || (!g_.alive(p) && g_.left(uint32_t(last)))) last = int32_t(p);
  }
  *who = last;
  return last >= 0;
}

void Messenger::check_faults() {
  const int64_t now = last_check_ = now_ns();
  if (const Status st = g_.health(); st != kOk) return fail_all(st);
  const std::vector<Request*> live = live_;
  for (Request* r : live) {
    int32_t who = r->args.peer;
    const Status st = now >= r->deadline ? kTimeout : lost(*r, &who) ? kPeerLost : kOk;
    if (st == kOk) continue;
    const uint64_t id = r->id;
    const bool send = !r->args.is_recv;
    if (forget(r) && send) send_control(uint32_t(r->args.peer), kCancel, id);
    finish(r, st, who);
  }
  progress();
}

void Messenger::fail_all(Status st) {
  const std::vector<Request*> live = live_;
  for (Request* r : live) {
    forget(r);
    finish(r, st, -1);
  }
}

}  // namespace c10d_custom
