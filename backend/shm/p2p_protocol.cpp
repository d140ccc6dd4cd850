// What two ranks say to each other about messages, in the cells between them: small messages whole, large ones
// announced, asked for and sent in pieces.
#include <algorithm>
#include <cstring>

#include "copy_out.h"
#include "p2p.h"

namespace c10d_custom {

bool Messenger::drain(uint32_t src) {
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
  Link& link = links_[dst];
  bool moved = false;
  while (!link.outbox.empty()) {
    Outgoing& o = link.outbox.front();
    if (!push(dst, o.header, o.request ? o.request->data() : nullptr, o.request ? o.header.bytes : 0)) break;
    moved = true;
    Request* done = o.request;
    link.outbox.pop_front();
    if (done) finish(done, kOk, int32_t(dst));
  }
  // A few cells, then the doorbell, so that the peer copies out while we copy in.
  for (unsigned burst = 0; !link.streams.empty(); ++burst) {
    Request* r = link.streams.front();
    const uint64_t size = std::min<uint64_t>(r->args.data.bytes - r->moved, g_.geometry.cell_bytes);
    if (!push(dst, CellHeader{kData, r->args.dtype, r->args.tag, r->id, size}, r->data() + r->moved, size)) break;
    moved = true;
    r->moved += size;
    if (r->moved == r->args.data.bytes) {
      link.streams.pop_front();
      finish(r, kOk, int32_t(dst));
    }
    if (burst % 4 == 3) Group::wake(g_.ctl(dst).doorbell);
  }
  if (moved) Group::wake(g_.ctl(dst).doorbell);
  return moved;
}

void Messenger::send_control(uint32_t dst, uint32_t kind, uint64_t message, const Request* about) {
  // Before what waits there: it answers something older.
  links_[dst].outbox.push_front(
      {CellHeader{kind, about ? about->args.dtype : 0, 0, message, about ? about->args.data.bytes : 0}, nullptr});
}

void Messenger::handle(uint32_t src, const CellHeader& h, const char* payload) {
  Link& link = links_[src];
  switch (h.kind) {
    case kEager:
    case kRequest: {
      if (match_posted(src, h, payload)) return;
      Envelope e{arrivals_++, h, {}};
      if (h.kind == kEager) e.payload.assign(payload, payload + h.bytes);
      link.unexpected.push_back(std::move(e));
      return;
    }
    case kData: {
      auto it = link.incoming.find(h.message);
      if (it == link.incoming.end()) return;  // given up meanwhile
      Request* r = it->second;
      if (h.bytes > r->args.data.bytes - r->moved) return;
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
      if (it == link.offered.end()) return;
      link.streams.push_back(it->second);
      it->second->granted = now_ns();
      link.offered.erase(it);
      return;
    }
    case kRefuse: {
      auto it = link.offered.find(h.message);
      if (it == link.offered.end()) return;
      Request* r = it->second;
      link.offered.erase(it);
      mismatch(r, src, h.bytes, h.dtype);
      return;
    }
    case kCancel:
    case kWithdraw: {
      link.unexpected.remove_if(
          [&](const Envelope& e) { return e.header.kind == kRequest && e.header.message == h.message; });
      auto it = link.incoming.find(h.message);
      if (it == link.incoming.end()) return;
      Request* r = it->second;
      link.incoming.erase(it);
      if (h.kind == kWithdraw) {  // none of its bytes came: the receive waits for another
        r->granted = 0;
        if (!match_unexpected(r)) posted_.push_front(r);
        return;
      }
      Failure gave_up{};
      gave_up.by = int32_t(src);
      finish(r, kTimeout, int32_t(src), &gave_up);
      return;
    }
    default: return;  // a cell this version does not know carries nothing for us
  }
}

bool Messenger::match_posted(uint32_t src, const CellHeader& h, const char* payload) {
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    Request* r = *it;
    if (r->args.tag != h.tag || (r->args.peer >= 0 && uint32_t(r->args.peer) != src)) continue;
    posted_.erase(it);
    deliver(src, h, payload, r);
    return true;
  }
  return false;
}

bool Messenger::match_unexpected(Request* r) {
  Link* from = nullptr;
  std::list<Envelope>::iterator best;
  for (uint32_t src = 0; src < g_.n; ++src) {
    if (r->args.peer >= 0 && uint32_t(r->args.peer) != src) continue;
    auto& list = links_[src].unexpected;
    auto it = std::find_if(list.begin(), list.end(), [&](const Envelope& e) { return e.header.tag == r->args.tag; });
    if (it != list.end() && (!from || it->arrival < best->arrival)) from = &links_[src], best = it;
  }
  if (!from) return false;
  Envelope e = std::move(*best);
  from->unexpected.erase(best);
  deliver(uint32_t(from - links_.data()), e.header, e.payload.data(), r);
  return true;
}

void Messenger::deliver(uint32_t src, const CellHeader& h, const char* payload, Request* r) {
  if (h.bytes != r->args.data.bytes || h.dtype != r->args.dtype) {
    if (h.kind == kRequest) send_control(src, kRefuse, h.message, r);
    mismatch(r, src, h.bytes, h.dtype);
    return;
  }
  if (h.kind == kRequest) {
    links_[src].incoming[h.message] = r;
    r->granted = now_ns();
    send_control(src, kGrant, h.message);
    return;
  }
  if (h.bytes) memcpy(r->data(), payload, h.bytes);
  r->ticket->source = int32_t(src);
  finish(r, kOk, int32_t(src));
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
