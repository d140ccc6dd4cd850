// What two ranks say to each other about messages, in the cells between them: small messages whole, large ones
// announced, asked for and sent in pieces.
#include <algorithm>
#include <cstring>

#include "copy_out.h"
#include "p2p.h"

namespace c10d_custom {

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
  const auto let_go = [&] {
    if (!--pending.messages) link.pending_in.erase(tag);
  };
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
  let_go();
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
