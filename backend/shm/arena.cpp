#include "arena.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "group.h"

namespace c10d_custom {
namespace {

constexpr uint64_t kSmallestPage = 4096;         // of any machine
constexpr int64_t kPeriod = 1000 * 1000 * 1000;  // ns
constexpr int kReadWrite = PROT_READ | PROT_WRITE;
constexpr uint64_t kPiece = 4 << 20;  // bytes of a block that move at once

// Of this process, for its forks. Never destroyed: the last tensors may go when the process ends.
struct All {
  std::mutex mutex;
  std::set<Arena*> arenas;
};
All& all() {
  static All* const known = new All;
  return *known;
}

}  // namespace

Arena* Arena::open(int fd, uint64_t at, uint64_t bytes, int* error) {
  static const int watched = watch_forks();
  if (watched) return *error = watched, nullptr;
  void* const base = map_pages(fd, at, bytes);
  if (base == MAP_FAILED) return *error = errno, nullptr;
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) {
    *error = errno;
    munmap(base, bytes);
    return nullptr;
  }
  madvise(base, bytes, MADV_DONTDUMP);
  return new Arena(own, at, bytes, static_cast<char*>(base));
}

Arena::Arena(int fd, uint64_t at, uint64_t bytes, char* base)
    : fd_(fd),
      at_(at),
      size_(bytes),
      base_(base),
      fork_generation_(g_fork_generation),
      bare_{{0, bytes}},
      since_(now_ns()) {
  std::lock_guard<std::mutex> hold(all().mutex);
  all().arenas.insert(this);
}

Arena::~Arena() {
  {
    std::lock_guard<std::mutex> hold(all().mutex);
    all().arenas.erase(this);
  }
  munmap(base_, size_);
  ::close(fd_);
}

// Takes the first bytes of a free range.
uint64_t Arena::cut(Ranges& from, Ranges::iterator range, uint64_t bytes) {
  const uint64_t where = range->first, left = range->second - bytes;
  from.erase(range);
  if (left) from[where + bytes] = left;
  return where;
}

void Arena::join(Ranges& to, uint64_t where, uint64_t bytes) {
  auto next = to.lower_bound(where);
  if (next != to.end() && next->first == where + bytes) {
    bytes += next->second;
    next = to.erase(next);
  }
  if (next != to.begin())
    if (auto before = std::prev(next); before->first + before->second == where) {
      before->second += bytes;
      return;
    }
  to[where] = bytes;
}

void* Arena::take(uint64_t wanted, bool kept, const GoesOn& goes_on, int* error) {
  if (wanted > size_) return *error = ENOMEM, nullptr;
  const uint64_t bytes = std::max(align_up(wanted, page_bytes()), page_bytes());
  std::unique_lock<std::mutex> hold(mutex_);
  age();
  uint64_t where;
  auto best = kept_.end();
  for (auto r = kept_.begin(); r != kept_.end(); ++r)
    if (r->second >= bytes && (best == kept_.end() || r->second < best->second)) best = r;
  if (best != kept_.end()) {
    where = cut(kept_, best, bytes);
    idle_bytes_ = std::min(idle_bytes_, kept_bytes_ -= bytes);
  } else {
    if (kept) return *error = ENODATA, nullptr;
    auto room = [&] { return std::find_if(bare_.begin(), bare_.end(), [&](auto& r) { return r.second >= bytes; }); };
    auto first = room();
    if (first == bare_.end()) let_go(kept_bytes_), first = room();
    if (first == bare_.end()) return *error = ENOMEM, nullptr;
    where = cut(bare_, first, bytes);
    hold.unlock();  // it takes its time, and `goes_on` may call anything
    *error = take_pages(fd_, at_ + where, base_ + where, bytes, goes_on);
    if (*error) give_back_pages(fd_, at_ + where, base_ + where, bytes);
    hold.lock();
    if (*error) return join(bare_, where, bytes), nullptr;
  }
  blocks_[where] = {bytes, false};
  owners_.fetch_add(1, std::memory_order_relaxed);
  return base_ + where;
}

void Arena::give_back(void* p) {
  if (fork_generation_ != g_fork_generation) return;  // the parent's
  {
    std::lock_guard<std::mutex> hold(mutex_);
    const auto block = blocks_.find(uint64_t(static_cast<char*>(p) - base_));
    const auto [where, of] = *block;
    blocks_.erase(block);
    if (of.cut_off) {
      madvise(p, of.bytes, MADV_DONTNEED);  // and peers may still use it: not to be used again
    } else {
      join(kept_, where, of.bytes);
      kept_bytes_ += of.bytes;
    }
    age();
  }
  drop();
}

// Gives the system memory of free ranges back, of the ends of the largest.
void Arena::let_go(uint64_t bytes) {
  while (bytes) {
    const auto largest =
        std::max_element(kept_.begin(), kept_.end(), [](auto& a, auto& b) { return a.second < b.second; });
    const uint64_t part = std::min(bytes, largest->second), where = largest->first + largest->second - part;
    give_back_pages(fd_, at_ + where, base_ + where, part);
    if (!(largest->second -= part)) kept_.erase(largest);
    kept_bytes_ -= part;
    bytes -= part;
    join(bare_, where, part);
  }
}

void Arena::age() {
  const int64_t now = now_ns();
  if (now - since_ < kPeriod) return;
  let_go(idle_bytes_);
  idle_bytes_ = kept_bytes_;
  since_ = now;
}

std::map<uint64_t, Arena::Block>::iterator Arena::block_at(const void* p) {
  const uint64_t where = uint64_t(static_cast<const char*>(p) - base_);
  if (where >= size_) return blocks_.end();
  const auto next = blocks_.upper_bound(where);
  if (next == blocks_.begin()) return blocks_.end();
  const auto found = std::prev(next);
  return where < found->first + found->second.bytes ? found : blocks_.end();
}

uint64_t Arena::place(const void* p, uint64_t bytes) {
  std::lock_guard<std::mutex> hold(mutex_);
  age();
  const auto found = block_at(p);
  if (found == blocks_.end() || found->second.cut_off) return kNever;
  const uint64_t where = uint64_t(static_cast<const char*>(p) - base_);
  return bytes <= found->first + found->second.bytes - where ? where : kNever;
}

// Maps these bytes again as a private copy (MAP_PRIVATE): a page is this process's own from its first write to it on.
bool Arena::make_private(uint64_t where, uint64_t bytes, int protection) {
  return mmap(base_ + where, bytes, protection, MAP_PRIVATE | MAP_FIXED, fd_, off_t(at_ + where)) != MAP_FAILED;
}

// The whole arena, but for what has been cut off, whose contents are in its mapping alone. `alone`: there is no other
// thread, which could use it meanwhile.
bool Arena::make_all_private(int protection, bool alone) {
  uint64_t from = 0;
  auto make = [&](uint64_t to) {
    if (from == to) return true;
    if (alone) munmap(base_ + from, to - from);  // where there is one mapping too many, no new one takes its place
    return make_private(from, to - from, protection);
  };
  for (const auto& [where, block] : blocks_) {
    if (!block.cut_off) continue;
    if (!make(where)) return false;
    from = where + block.bytes;
  }
  return make(size_);
}

// Makes these bytes private, whatever becomes of the other blocks. Returns whether they can be written to. The system
// may refuse for two reasons. No more mappings (vm.max_map_count): the whole arena takes one, and its other blocks
// become private with it. Or not so much memory may be promised (vm.overcommit_memory=2): then they can be read, and
// who writes to them is ended rather than seen by others.
bool Arena::make_private_somehow(uint64_t where, uint64_t bytes, bool alone) {
  if (make_private(where, bytes, kReadWrite)) return true;
  const bool writable = make_all_private(kReadWrite, alone);
  if (!writable) {
    if (!alone && make_private(where, bytes, PROT_READ)) return false;
    if (!make_all_private(PROT_READ, alone)) mprotect(base_, size_, PROT_NONE);
  }
  for (auto& [at, block] : blocks_) block.cut_off = true;
  return writable;
}

// Of private bytes: no peer sees or changes them any more. Takes no memory to speak of, for what it takes here it gives
// back there.
void Arena::move(uint64_t where, uint64_t bytes) {
  for (uint64_t at = where; at < where + bytes; at += kSmallestPage) {
    volatile char* const byte = base_ + at;
    *byte = *byte;
  }
  give_back_pages(fd_, at_ + where, base_ + where, bytes);
}

void Arena::cut_off(const void* p) {
  std::lock_guard<std::mutex> hold(mutex_);
  const auto found = block_at(p);
  if (found == blocks_.end() || found->second.cut_off) return;
  uint64_t where = found->first;
  const uint64_t end = where + found->second.bytes;
  // Piece by piece: so much may be promised twice, and is there twice, meanwhile.
  for (uint64_t piece; where < end; where += piece) {
    piece = std::min(kPiece, end - where);
    if (!make_private(where, piece, kReadWrite)) break;
    move(where, piece);
  }
  if (where < end && make_private_somehow(where, end - where, false))
    for (; where < end; where += kPiece) move(where, std::min(kPiece, end - where));
  found->second.cut_off = true;
}

// --- forks: a child's tensors must not be the parent's, whose peers write to them

int Arena::watch_forks() { return pthread_atfork(before_fork, after_fork, in_child); }

void Arena::before_fork() {
  all().mutex.lock();
  for (Arena* a : all().arenas) a->mutex_.lock();
}

void Arena::after_fork() {
  for (Arena* a : all().arenas) a->mutex_.unlock();
  all().mutex.unlock();
}

void Arena::in_child() {
  for (Arena* a : all().arenas) a->copy_for_child();
  after_fork();
}

void Arena::copy_for_child() {
  for (const auto& [where, block] : blocks_)
    if (!block.cut_off) make_private_somehow(where, block.bytes, true);
}

// --- of all ranks

Arenas::Arenas(int fd, uint32_t rank, const Geometry& g, uint64_t at)
    : fd_(fd), rank_(rank), n_(g.ranks), at_(at), size_(g.arena_bytes) {}

Arenas::~Arenas() {
  for (char* w : windows_)
    if (w) munmap(w, size_);
  if (Arena* a = own()) a->drop();
}

void* Arenas::take(uint64_t bytes, bool kept, const GoesOn& goes_on, Arena** arena, int* error) {
  if (!size_) return *error = ENOTSUP, nullptr;
  if (!own()) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (!own()) {
      Arena* const made = Arena::open(fd_, at_ + rank_ * size_, size_, error);
      if (!made) return *error = *error == ENOMEM || *error == EAGAIN ? ENOTSUP : *error, nullptr;  // no addresses
      own_.store(made, std::memory_order_release);
    }
  }
  *arena = own();
  return (*arena)->take(bytes, kept, goes_on, error);
}

uint64_t Arenas::place(const void* p, uint64_t bytes) {
  Arena* const a = own();
  const uint64_t where = a ? a->place(p, bytes) : kNever;
  return where != kNever && map_windows() ? where + 1 : 0;
}

char* Arenas::reach(uint32_t rank, uint64_t place, uint64_t bytes) const {
  if (!fits(place, bytes) || !has_windows_.load(std::memory_order_acquire)) return nullptr;
  return (rank == rank_ ? own()->base() : windows_[rank]) + (place - 1);
}

char* Arenas::map(uint32_t rank, uint64_t place, uint64_t bytes, int* error) const {
  if (!fits(place, bytes)) return *error = EINVAL, nullptr;
  const uint64_t shift = (place - 1) % page_bytes();
  void* const m = map_pages(fd_, at_ + rank * size_ + (place - 1 - shift), shift + bytes);
  if (m == MAP_FAILED) return *error = errno, nullptr;
  madvise(m, shift + bytes, MADV_DONTDUMP);
  return static_cast<char*>(m) + shift;
}

void Arenas::unmap(char* mapped, uint64_t bytes) {
  const uint64_t shift = reinterpret_cast<uintptr_t>(mapped) % page_bytes();
  munmap(mapped - shift, shift + bytes);
}

bool Arenas::map_windows() {
  if (has_windows_.load(std::memory_order_acquire)) return true;
  std::lock_guard<std::mutex> hold(mutex_);
  if (has_windows_.load(std::memory_order_relaxed)) return true;
  std::vector<char*> windows(n_);
  for (uint32_t r = 0; r < n_; ++r) {
    if (r == rank_) continue;
    void* const w = map_pages(fd_, at_ + r * size_, size_);
    if (w == MAP_FAILED) {
      for (char* mapped : windows)
        if (mapped) munmap(mapped, size_);
      return false;
    }
    madvise(w, size_, MADV_DONTDUMP);
    madvise(w, size_, MADV_DONTFORK);
    windows[r] = static_cast<char*>(w);
  }
  windows_ = std::move(windows);
  has_windows_.store(true, std::memory_order_release);
  return true;
}

}  // namespace c10d_custom
