#include "p2p.h"

#include <errno.h>

#include <algorithm>
#include <cstring>

#include "crew.h"

namespace c10d_custom {
namespace {

// Short enough to copy twice rather than to ask first, while there is room.
constexpr uint64_t kEagerLimit = 16 << 10;
// How many times what the ring takes a receiver keeps of short messages from one sender.
constexpr uint64_t kRoom = 8;

}  // namespace

Messenger::Messenger(Group& g) : g_(g), links_(g.n) {}

Messenger::~Messenger() {
  std::unique_lock<std::mutex> hold(mutex_);
  if (!closing_) fail_all(kAborted);
  closing_ = true;
  helper_cv_.notify_all();
  changed_.notify_all();
  while (waiters_ || has_helper_) changed_.wait(hold);
}

int Messenger::probe(int64_t tag) {
  std::lock_guard<std::mutex> hold(mutex_);
  if (closing_) return -1;
  progress();
  const auto found = oldest(unexpected_, tag, 0, g_.n);
  return found == unexpected_.end() ? -1 : int(std::get<1>(found->first));
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
  for (const Request& r : live_) out.push_back(trace_record(r.args, r.id, r.ticket->started, r.granted));
}

Ticket* Messenger::post(const MessageArgs& a) {
  std::unique_lock<std::mutex> hold(mutex_);
  const int64_t now = now_ns();
  auto* t = new Ticket(now);
  t->message = true;
  live_.push_back({t, a, next_id_++});
  Request* const r = &live_.back();
  r->among_live = std::prev(live_.end());
  t->request = r;
  last_post_ = now;
  if (closing_ || g_.health() != kOk) {
    finish(r, g_.health() == kBroken ? kBroken : kAborted, -1);
    return t;
  }
  if (a.peer >= int64_t(g_.n) || a.peer < (a.is_recv ? -1 : 0) || (a.data.bytes && !a.data.data)) {
    finish(r, kUsage, -1);
    return t;
  }
  ++(a.peer < 0 ? any_ : links_[uint32_t(a.peer)].live);
  r->counted = true;
  if (a.is_recv) {
    if (!match_unexpected(r)) await_message(r);
  } else {
    const uint32_t dst = uint32_t(a.peer);
    Link& link = links_[dst];
    // A short one would go into a ring that nobody reads any more, and count as sent.
    if (link.gone || (dst != g_.rank && g_.left(dst))) {
      finish(r, kPeerLost, a.peer);
      return t;
    }
    if (!link.reserved) {
      if (const int error = g_.reserve_cells(dst, [&] { return g_.health() == kOk && now_ns() < r->deadline; })) {
        const Status st = g_.health();
        if (error == ECANCELED)
          finish(r, st != kOk ? st : kTimeout, a.peer);
        else
          exhausted(r, error);
        return t;
      }
      link.reserved = true;
    }
    const bool brief = a.data.bytes <= std::min<uint64_t>(kEagerLimit, g_.geometry.cell_bytes);
    const bool eager = brief && !link.pending_out.count(a.tag) && room_for(dst, a.data.bytes);
    if (brief && !eager) count_pending(r, link.pending_out);
    const CellHeader h{eager ? kEager : kRequest, a.dtype, a.tag, r->id, a.data.bytes};
    if (!eager) link.offered[r->id] = r;
    r->unsent = link.outbox.insert(link.outbox.end(), {h, r});
    r->place = Request::kUnsent;
  }
  progress();
  if (!live_.empty() && !has_helper_) {
    const int error = lend_thread([](void* me) { static_cast<Messenger*>(me)->help(); }, this);
    has_helper_ = !error;
    unaided_.store(error != 0, std::memory_order_relaxed);
  }
  return t;
}

// Takes room at the receiver for a short message; false if there is not so much.
bool Messenger::room_for(uint32_t dst, uint64_t bytes) {
  Link& link = links_[dst];
  const uint64_t room = kRoom * g_.geometry.cells * (sizeof(CellHeader) + g_.geometry.cell_bytes);
  const uint64_t charged = link.charged + sizeof(CellHeader) + bytes;
  if (charged - link.credited > room &&
      charged - (link.credited = g_.pair(g_.rank, dst).consumed.load(std::memory_order_relaxed)) > room)
    return false;
  link.charged = charged;
  return true;
}

// This machine gave what the request needs no memory. Its peer would wait for it: the group ends.
void Messenger::exhausted(Request* r, int error) {
  Failure f{};
  f.actual = uint64_t(error);
  g_.poison(kExhausted, int32_t(g_.rank), uint64_t{0}, error);
  forget(r);
  finish(r, kExhausted, r->args.peer, &f);
}

Status Messenger::withdraw(Ticket* t) {
  std::unique_lock<std::mutex> hold(mutex_);
  auto* const r = static_cast<Request*>(t->request);
  if (!r) return kOk;
  // Who has granted a message must expect it at any moment.
  if (r->args.is_recv ? r->granted != 0 : r->moved > 0) {
    hold.unlock();
    g_.abort();
    return kAborted;
  }
  const uint64_t id = r->id;
  const int32_t peer = r->args.peer;
  if (forget(r)) send_control(uint32_t(peer), kWithdraw, id);
  finish(r, kAborted, peer);
  progress();
  return kOk;
}

Status Messenger::wait(Ticket* t, int64_t timeout_ns) {
  if (t->state() != kPending) return t->state();
  const int64_t until = deadline_after(now_ns(), timeout_ns);
  std::unique_lock<std::mutex> hold(mutex_);
  if (t->request) want(static_cast<Request*>(t->request));
  ++waiters_;
  while (t->state() == kPending && !closing_) {
    const int64_t now = now_ns();
    if (now >= until) break;
    if (driving_) {
      // The driver may be the helper, asleep: it gives up its seat once it sees a waiter.
      Group::wake(g_.ctl(g_.rank).doorbell);
      changed_.wait_for(hold, std::min(until - now, kSlice));
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

void Messenger::want(Request* r) {
  if (r->wanted) return;
  r->wanted = now_ns();
  r->deadline = deadline_after(r->wanted, r->args.timeout_ns);
  due_ = std::min(due_, r->deadline);
}

bool Messenger::aid() {
  if (!unaided_.load(std::memory_order_relaxed)) return false;
  std::unique_lock<std::mutex> hold(mutex_, std::try_to_lock);
  if (!hold || driving_ || closing_) return true;  // somebody is at it
  progress();
  if (now_ns() - last_check_ >= kSlice) check_faults();
  if (live_.empty()) unaided_.store(false, std::memory_order_relaxed);
  return true;
}

void Messenger::help() {
  std::unique_lock<std::mutex> hold(mutex_);
  while (!closing_) {
    if (live_.empty() && now_ns() - last_post_ > idle::kMessagesKeep) break;
    helper_cv_.wait_for(hold, idle::kMessagesTick);
    if (driving_ || live_.empty()) continue;
    driving_ = true;
    while (!live_.empty() && !closing_ && waiters_ == 0) step(hold, INT64_MAX);
    driving_ = false;
    changed_.notify_all();
  }
  has_helper_ = false;
  changed_.notify_all();
}

void Messenger::step(std::unique_lock<std::mutex>& hold, int64_t until) {
  if (progress()) {
    if (now_ns() - last_check_ >= kSlice) check_faults();
    return;
  }
  const uint32_t peer = awaited();
  hold.unlock();
  const bool moved = g_.spinner.spin(
      now_ns(), until,
      [&] {
        if (!anything_to_do()) return false;
        std::lock_guard<std::mutex> look(mutex_);
        return progress();
      },
      [] {}, [&](int64_t now) { return g_.leaves_core_of_messages(peer, now); }, nullptr, false);
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

uint32_t Messenger::awaited() const {
  const int32_t peer = live_.empty() ? -1 : live_.back().args.peer;
  return peer < 0 ? g_.rank : uint32_t(peer);
}

bool Messenger::progress() {
  bool moved = false, waits = false;
  for (uint32_t r = 0; r < g_.n; ++r) moved |= drain(r);
  for (uint32_t r = 0; r < g_.n; ++r) {
    moved |= flush(r);
    const Link& link = links_[r];
    waits |= !link.controls.empty() || !link.outbox.empty() || !link.streams.empty();
  }
  outgoing_.store(waits, std::memory_order_relaxed);
  return moved;
}

bool Messenger::anything_to_do() const {
  for (uint32_t r = 0; r < g_.n; ++r) {
    if (!hears_of(r)) continue;
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
  Ticket* t = r->ticket;
  f.elapsed_ns = now - (r->wanted ? r->wanted : t->started);
  if (TraceRecord* record = trace_.begin(trace_record(r->args, r->id, t->started, r->granted))) {
    record->ended = now;
    record->status = st;
    if (r->args.is_recv && t->source >= 0) record->peer = t->source;
  }
  settle(r);
  if (r->counted) --(r->args.peer < 0 ? any_ : links_[uint32_t(r->args.peer)].live);
  live_.erase(r->among_live);
  t->request = nullptr;
  t->finish(st, f, g_.queue().completed);
  t->drop();
  if (waiters_ > 1 || (waiters_ && !driving_)) changed_.notify_all();
}

// Takes a request out of wherever it stands. Whether it is a send that the peer knows of.
bool Messenger::forget(Request* r) {
  settle(r);
  const auto place = r->place;
  r->place = Request::kElsewhere;
  if (place == Request::kPosted) posted_.erase({r->args.tag, r->args.peer, r->id});
  if (place == Request::kGranted) {
    auto& incoming = links_[r->source].incoming;
    const auto it = incoming.find(r->message);
    if (it != incoming.end() && it->second == r) incoming.erase(it);
  }
  if (r->args.is_recv || place == Request::kElsewhere) return false;
  Link& link = links_[uint32_t(r->args.peer)];
  link.offered.erase(r->id);
  if (place == Request::kUnsent) {
    if (r->unsent->header.kind == kEager) link.charged -= sizeof(CellHeader) + r->args.data.bytes;
    link.outbox.erase(r->unsent);
    return false;
  }
  if (place == Request::kStreams) link.streams.erase(r->in_streams);
  return true;
}

bool Messenger::look_at_peers() {
  bool any = false;
  for (uint32_t p = 0; p < g_.n; ++p) {
    Link& link = links_[p];
    if (p == g_.rank || (!link.live && !any_)) continue;
    link.gone = g_.gone(p);
    any |= link.gone;
  }
  return any;
}

bool Messenger::lost(const Request& r, int32_t* who) const {
  // What it has sent still counts.
  auto gone = [&](uint32_t p) {
    if (!links_[p].gone || !hears_of(p)) return links_[p].gone;
    const PairCtl& from = g_.pair(p, g_.rank);
    return from.tail.load(std::memory_order_acquire) == from.head.load(std::memory_order_relaxed);
  };
  if (r.args.peer >= 0) return gone(uint32_t(*who = r.args.peer));
  // Any source: somebody may still send, unless the message under way came from the one that died.
  if (r.place == Request::kGranted && r.source != g_.rank) return gone(uint32_t(*who = int32_t(r.source)));
  int32_t last = -1;
  for (uint32_t p = 0; p < g_.n; ++p) {
    if (p == g_.rank) continue;
    if (!gone(p)) return false;
    // Of several, one that has died says more than one that has left.
    if (last < 0 || (!g_.left(p) && g_.left(uint32_t(last)))) last = int32_t(p);
  }
  *who = last;
  return last >= 0;
}

void Messenger::check_faults() {
  const int64_t now = last_check_ = now_ns();
  if (const Status st = g_.health(); st != kOk) return fail_all(st);
  if (!look_at_peers() && now < due_) return;
  due_ = INT64_MAX;
  for (auto it = live_.begin(); it != live_.end();) {
    Request* const r = &*it++;
    int32_t who = r->args.peer;
    const Status st = now >= r->deadline ? kTimeout : lost(*r, &who) ? kPeerLost : kOk;
    if (st == kOk) {
      due_ = std::min(due_, r->deadline);
      continue;
    }
    const uint64_t id = r->id;
    if (forget(r)) send_control(uint32_t(r->args.peer), kCancel, id);
    finish(r, st, who);
  }
  progress();
}

void Messenger::fail_all(Status st) {
  while (!live_.empty()) {
    Request* const r = &live_.front();
    forget(r);
    finish(r, st, -1);
  }
}

// --- the protocol: what two ranks say to each other about messages, in the cells between them: small messages whole,
// large ones announced, asked for and sent in pieces.

bool Messenger::drain(uint32_t src) {
  if (!hears_of(src)) return false;
  PairCtl& p = g_.pair(src, g_.rank);
  uint64_t head = p.head.load(std::memory_order_relaxed);
  uint64_t tail = p.tail.load(std::memory_order_seq_cst);
  // More cells than there are is no count of ours: it would never end.
  if (head == tail || tail - head > g_.geometry.cells) return false;
  for (; head != tail; ++head) {
    const CellHeader* shared = g_.cell(src, g_.rank, head);
    CellHeader h = *shared;  // judged and used as one copy, whatever the peer writes meanwhile
    const bool carries = h.kind == kEager || h.kind == kData;
    const char* payload = h.bytes <= sizeof h.small ? h.small : reinterpret_cast<const char*>(shared + 1);
    if (!carries || h.bytes <= g_.geometry.cell_bytes) handle(src, h, payload);
    p.head.store(head + 1, std::memory_order_seq_cst);
  }
  Group::wake(g_.ctl(src).doorbell);
  return true;
}

bool Messenger::push(uint32_t dst, const CellHeader& h, const char* payload, uint64_t bytes) {
  PairCtl& p = g_.pair(g_.rank, dst);
  const uint64_t tail = p.tail.load(std::memory_order_relaxed);
  uint64_t& head = links_[dst].head;
  if (tail - head >= g_.geometry.cells && tail - (head = p.head.load(std::memory_order_seq_cst)) >= g_.geometry.cells)
    return false;
  CellHeader* cell = g_.cell(g_.rank, dst, tail);
  *cell = h;
  copy_in_(bytes <= sizeof cell->small ? cell->small : static_cast<void*>(cell + 1), payload, bytes);
  p.tail.store(tail + 1, std::memory_order_seq_cst);
  return true;
}

bool Messenger::flush(uint32_t dst) {
  const bool moved = flush_cells(dst);
  if (moved) Group::wake(g_.ctl(dst).doorbell);
  return moved;
}

// In this order, each as far as there is room: what answers the peer, what is new to it, what it has granted.
bool Messenger::flush_cells(uint32_t dst) {
  Link& link = links_[dst];
  bool moved = false;
  for (; !link.controls.empty(); link.controls.pop_front()) {
    if (!push(dst, link.controls.front(), nullptr, 0)) return moved;
    moved = true;
  }
  while (!link.outbox.empty()) {
    const Outgoing& o = link.outbox.front();
    Request* const r = o.request;
    const bool whole = o.header.kind == kEager;
    if (!push(dst, o.header, r->data(), whole ? o.header.bytes : 0)) return moved;
    moved = true;
    link.outbox.pop_front();
    r->place = whole ? Request::kElsewhere : Request::kOffered;
    if (whole) finish(r, kOk, int32_t(dst));
  }
  // A few cells, then the doorbell, so that the peer copies out while we copy in.
  for (unsigned burst = 0; !link.streams.empty(); ++burst) {
    Request* r = link.streams.front();
    const uint64_t size = std::min<uint64_t>(r->args.data.bytes - r->moved, g_.geometry.cell_bytes);
    if (!push(dst, CellHeader{kData, r->args.dtype, r->args.tag, r->id, size}, r->data() + r->moved, size)) break;
    moved = true;
    settle(r);
    r->moved += size;
    if (r->moved == r->args.data.bytes) {
      link.streams.pop_front();
      link.offered.erase(r->id);
      finish(r, kOk, int32_t(dst));
    }
    if (burst % 4 == 3) Group::wake(g_.ctl(dst).doorbell);
  }
  return moved;
}

void Messenger::send_control(uint32_t dst, uint32_t kind, uint64_t message, const Request* about) {
  links_[dst].controls.push_back({kind, about ? about->args.dtype : 0, 0, message, about ? about->args.data.bytes : 0});
}

void Messenger::handle(uint32_t src, const CellHeader& h, const char* payload) {
  Link& link = links_[src];
  switch (h.kind) {
    case kEager:
    case kRequest: {
      if (Request* r = posted_for(src, h.tag)) {
        posted_.erase({h.tag, r->args.peer, r->id});
        r->place = Request::kElsewhere;
        const auto pending = link.pending_in.find(h.tag);
        if (h.kind == kEager && pending != link.pending_in.end()) pending->second.overtook.push_back(h);
        return deliver(src, h, payload, r);
      }
      const auto it = unexpected_.insert({{h.tag, src, arrivals_++}, {h, {}}}).first;
      if (h.kind == kEager)
        it->second.payload.assign(payload, payload + h.bytes);
      else
        link.announced[h.message] = it;
      return;
    }
    case kData: {
      auto it = link.incoming.find(h.message);
      if (it == link.incoming.end()) return;  // given up meanwhile
      Request* r = it->second;
      if (h.bytes > r->args.data.bytes - r->moved) return;
      settle(r);
      CopyOut(2 * r->args.data.bytes)(r->data() + r->moved, payload, h.bytes);
      r->moved += h.bytes;
      if (r->moved == r->args.data.bytes) {
        link.incoming.erase(it);
        r->ticket->source = int32_t(src);
        finish(r, kOk, int32_t(src));
      }
      return;
    }
    case kGrant: {
      auto it = link.offered.find(h.message);
      if (it == link.offered.end() || it->second->place != Request::kOffered) return;
      Request* const r = it->second;
      r->in_streams = link.streams.insert(link.streams.end(), r);
      r->place = Request::kStreams;
      r->granted = now_ns();
      return;
    }
    case kRefuse: {  // perhaps of what was granted, when a message before it was taken back
      auto it = link.offered.find(h.message);
      if (it == link.offered.end() || it->second->place == Request::kUnsent) return;
      Request* const r = it->second;
      forget(r);
      mismatch(r, src, h.bytes, h.dtype);
      return;
    }
    case kCancel:
    case kWithdraw: return taken_back(src, h.message, h.kind == kWithdraw);
    default: return;  // a cell this version does not know carries nothing for us
  }
}

void Messenger::taken_back(uint32_t src, uint64_t message, bool withdrawn) {
  Link& link = links_[src];
  if (const auto early = link.announced.find(message); early != link.announced.end()) {
    unexpected_.erase(early->second);
    link.announced.erase(early);
  }
  const auto it = link.incoming.find(message);
  if (it == link.incoming.end()) return;
  Request* const r = it->second;
  if (withdrawn && !r->moved) return release(src, message, r);
  forget(r);
  Failure gave_up{};
  gave_up.by = int32_t(src);
  finish(r, kTimeout, int32_t(src), &gave_up);
}

// A receive whose message was taken back gets the next of the same source and tag that a later receive has found,
// which then gets the one after it, and so on.
void Messenger::release(uint32_t src, uint64_t message, Request* r) {
  Link& link = links_[src];
  const int64_t tag = r->args.tag;
  Pending& pending = link.pending_in[tag];
  ++pending.messages;  // stays while receives change places
  forget(r);
  r->granted = 0;
  for (auto it = link.incoming.upper_bound(message); it != link.incoming.end();) {
    const uint64_t id = it->first;
    Request* const later = it++->second;
    if (later->args.tag != tag || later->id < r->id || later->moved) continue;
    if (std::any_of(pending.overtook.begin(), pending.overtook.end(),
                    [&](const CellHeader& h) { return h.message > message && h.message < id; }))
      break;
    const int64_t granted = later->granted;
    forget(later);
    later->granted = 0;
    if (r->args.data.bytes == later->args.data.bytes && r->args.dtype == later->args.dtype) {
      receive_granted(src, id, r, granted);
    } else {
      send_control(src, kRefuse, id, r);
      mismatch(r, src, later->args.data.bytes, later->args.dtype);
    }
    message = id;
    r = later;
  }
  // One that was short went to a later receive, and is over there. It would not have fitted this one.
  const auto first = std::find_if(pending.overtook.begin(), pending.overtook.end(),
                                  [&](const CellHeader& h) { return h.message > message; });
  if (first != pending.overtook.end())
    mismatch(r, src, first->bytes, first->dtype);
  else if (!match_unexpected(r))
    await_message(r);
  if (!--pending.messages) link.pending_in.erase(tag);
}

Messenger::Request* Messenger::posted_for(uint32_t src, int64_t tag) {
  if (posted_.empty()) return nullptr;
  Request* found = nullptr;
  for (const int32_t peer : {int32_t(src), -1}) {
    const auto it = posted_.lower_bound({tag, peer, 0});
    if (it == posted_.end() || std::get<0>(it->first) != tag || std::get<1>(it->first) != peer) continue;
    if (!found || it->second->id < found->id) found = it->second;
  }
  return found;
}

void Messenger::await_message(Request* r) {
  posted_[{r->args.tag, r->args.peer, r->id}] = r;
  r->place = Request::kPosted;
}

Messenger::Unexpected::iterator Messenger::oldest(Unexpected& all, int64_t tag, uint32_t first, uint32_t end) {
  auto best = all.end();
  if (all.empty()) return best;
  for (uint32_t src = first; src < end; ++src) {
    const auto it = all.lower_bound({tag, src, 0});
    if (it == all.end() || std::get<0>(it->first) != tag) break;
    src = std::get<1>(it->first);
    if (src < end && (best == all.end() || std::get<2>(it->first) < std::get<2>(best->first))) best = it;
  }
  return best;
}

bool Messenger::match_unexpected(Request* r) {
  const bool any = r->args.peer < 0;
  const uint32_t first = any ? 0 : uint32_t(r->args.peer);
  const auto found = oldest(unexpected_, r->args.tag, first, any ? g_.n : first + 1);
  if (found == unexpected_.end()) return false;
  const uint32_t src = std::get<1>(found->first);
  const Envelope e = std::move(found->second);
  if (e.header.kind == kRequest) {
    auto& announced = links_[src].announced;
    const auto it = announced.find(e.header.message);
    if (it != announced.end() && it->second == found) announced.erase(it);
  }
  unexpected_.erase(found);
  deliver(src, e.header, e.payload.data(), r);
  return true;
}

void Messenger::deliver(uint32_t src, const CellHeader& h, const char* payload, Request* r) {
  if (h.kind == kEager) consume(src, h.bytes);
  if (h.bytes != r->args.data.bytes || h.dtype != r->args.dtype) {
    if (h.kind == kRequest) send_control(src, kRefuse, h.message, r);
    mismatch(r, src, h.bytes, h.dtype);
    return;
  }
  if (h.kind == kRequest) {
    receive_granted(src, h.message, r, now_ns());
    send_control(src, kGrant, h.message);
    return;
  }
  if (h.bytes) memcpy(r->data(), payload, h.bytes);
  r->ticket->source = int32_t(src);
  finish(r, kOk, int32_t(src));
}

void Messenger::receive_granted(uint32_t src, uint64_t message, Request* r, int64_t granted) {
  Link& link = links_[src];
  link.incoming[message] = r;
  r->place = Request::kGranted;
  r->source = src;
  r->message = message;
  r->granted = granted;
  count_pending(r, link.pending_in);
}

// A short message of so many bytes is no longer kept here.
void Messenger::consume(uint32_t src, uint64_t bytes) {
  g_.pair(src, g_.rank).consumed.store(links_[src].consumed += sizeof(CellHeader) + bytes, std::memory_order_relaxed);
}

void Messenger::count_pending(Request* r, std::map<int64_t, Pending>& of) {
  ++of[r->args.tag].messages;
  r->pending = true;
}

// A byte of it moves, or it is out of its place.
void Messenger::settle(Request* r) {
  if (!r->pending) return;
  r->pending = false;
  auto& pending = r->args.is_recv ? links_[r->source].pending_in : links_[uint32_t(r->args.peer)].pending_out;
  const auto it = pending.find(r->args.tag);
  if (!--it->second.messages) pending.erase(it);
}

void Messenger::mismatch(Request* r, uint32_t src, uint64_t bytes, uint32_t dtype) {
  Failure f{};
  f.by = -1;
  f.expected = r->args.data.bytes;
  f.expected_dtype = r->args.dtype;
  f.actual = bytes;
  f.actual_dtype = dtype;
  finish(r, kMismatch, int32_t(src), &f);
}

}  // namespace c10d_custom
