#include "window.h"

#include <algorithm>
#include <cstring>

namespace c10d_custom {

namespace {
constexpr uint64_t kBlock = 64 << 10;  // bytes after which a put looks which way of copying is faster
}

std::unique_ptr<Window> Window::open(Group& g, const WindowPart* parts) {
  std::unique_ptr<Window> made(new Window(g));
  auto signals = [&](uint32_t rank) {
    return reinterpret_cast<Signal*>(g.arenas.reach(rank, parts[rank].signals, g.n * sizeof(Signal)));
  };
  Signal* const own = signals(g.rank);
  for (uint32_t r = 0; r < g.n; ++r) {
    const WindowPart& p = parts[r];
    if (!p.item_bytes || p.items > kNever / p.item_bytes) return nullptr;
    char* const data = g.arenas.reach(r, p.data, p.items * p.item_bytes);
    Signal* const its = signals(r);
    if (!data || !its || !own) return nullptr;
    made->sides_.push_back({data, p.items, p.dtype, p.item_bytes, its + g.rank, own + r});
  }
  return made;
}

Status Window::put(uint32_t peer, uint32_t dtype, const void* from, uint64_t count, uint64_t offset) {
  const Side& s = sides_[peer];
  if (dtype != s.dtype || offset > s.items || count > s.items - offset) return kUsage;
  if (const Status st = g_.health(); st != kOk) return st;
  write(s.data + offset * s.item_bytes, static_cast<const char*>(from), count * s.item_bytes);
  return kOk;
}

void Window::write(char* to, const char* from, uint64_t bytes) {
  const bool overlap = from < to + bytes && to < from + bytes;  // a view of the window itself
  std::unique_lock<std::mutex> hold(copy_mutex_, std::defer_lock);
  if (overlap || bytes < CopyIn::kWorth || !hold.try_lock()) {
    memmove(to, from, bytes);
    return;
  }
  for (uint64_t size; bytes; to += size, from += size, bytes -= size) {
    size = std::min(bytes, kBlock);
    copy_in_(to, from, size);
  }
}

Status Window::signal(uint32_t peer) {
  if (const Status st = g_.health(); st != kOk) return st;
  Side& s = sides_[peer];
  std::lock_guard<std::mutex> hold(mutex_);
  g_.advance(*s.to, ++s.sent);
  return kOk;
}

uint64_t Window::claim(uint32_t peer) {
  Side& s = sides_[peer];
  std::lock_guard<std::mutex> hold(mutex_);
  if (s.given_back.empty()) return ++s.claimed;
  const uint64_t first = *s.given_back.begin();
  s.given_back.erase(s.given_back.begin());
  return first;
}

void Window::give_back(uint32_t peer, uint64_t number) {
  std::lock_guard<std::mutex> hold(mutex_);
  sides_[peer].given_back.insert(number);
}

Status Window::await(uint32_t peer, uint64_t number, int64_t deadline) {
  return g_.wait_beside_collectives(*sides_[peer].from, number, peer, deadline);
}

}  // namespace c10d_custom
