// Arenas: memory of the segment for the tensors of a rank, which collectives read and write where they lie.
//
// A rank takes blocks from its own arena, and maps those of the others (their windows) when a collective is to reach
// into them. A block is its tensor's alone: peers touch it only in a collective that has named it on its own rank, from
// all ranks' announcements until all ranks have said that they are done. A rank that leaves such a call sooner, with an
// error, while peers are still in it, takes its block from them (cut_off): its contents move to private memory, and
// peers find zeros, or what they write themselves.
//
// Memory that blocks leave is kept for the next ones: to get it anew, page by page, takes longer than to copy what goes
// there. What has not been needed for a period goes back to the system.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "pages.h"

namespace c10d_custom {

struct Geometry;

// One rank's own. Lives until the group and every block have let go of it. Any thread may call.
class Arena {
 public:
  // Maps so many bytes of the memfd from `at` on. Null, and *error = errno.
  static Arena* open(int fd, uint64_t at, uint64_t bytes, int* error);

  char* base() const { return base_; }
  // As c10d_take and c10d_give_back.
  void* take(uint64_t bytes, bool kept, const GoesOn& goes_on, int* error);
  void give_back(void* block);
  // Where these bytes lie; kNever where they are not all in one block that peers may use. To be asked often.
  uint64_t place(const void* p, uint64_t bytes);
  void cut_off(const void* p);
  void drop() {
    if (owners_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 private:
  struct Block {
    uint64_t bytes;
    bool cut_off;
  };
  using Ranges = std::map<uint64_t, uint64_t>;  // where -> bytes; no two touch

  Arena(int fd, uint64_t at, uint64_t bytes, char* base);
  ~Arena();
  static uint64_t cut(Ranges& from, Ranges::iterator range, uint64_t bytes);
  static void join(Ranges& to, uint64_t where, uint64_t bytes);
  std::map<uint64_t, Block>::iterator block_at(const void* p);
  bool make_private(uint64_t where, uint64_t bytes, int protection);
  bool make_all_private(int protection, bool alone);
  bool make_private_somehow(uint64_t where, uint64_t bytes, bool alone);
  void move(uint64_t where, uint64_t bytes);
  void copy_for_child();
  void let_go(uint64_t bytes);
  void age();
  static void before_fork();
  static void after_fork();
  static void in_child();
  static int watch_forks();

  const int fd_;  // a duplicate; closed once the group's is, for with it would go the liveness lock
  const uint64_t at_, size_;
  char* const base_;
  const unsigned fork_generation_;
  std::atomic<int64_t> owners_{1};
  std::mutex mutex_;
  std::map<uint64_t, Block> blocks_;
  Ranges kept_, bare_;  // free: with memory, and without
  uint64_t kept_bytes_ = 0;
  uint64_t idle_bytes_ = 0;  // the least there were of those since `since_`: nobody needed them
  int64_t since_;
};

// Of the ranks of a group, as one of them sees them.
class Arenas {
 public:
  Arenas(int fd, uint32_t rank, const Geometry&, uint64_t at);
  ~Arenas();

  // ENOTSUP: this process has no arena, and gets none.
  void* take(uint64_t bytes, bool kept, const GoesOn& goes_on, Arena** arena, int* error);
  void cut_off(const void* p) { own()->cut_off(p); }

  // What the rank announces of these bytes, its fingerprint's `place`: 0 unless they are in its arena and it can reach
  // into the others'.
  uint64_t place(const void* p, uint64_t bytes);
  // The bytes of which a peer has announced that; null where they would not be in its arena. Once this rank has
  // announced a place.
  char* at(uint32_t peer, uint64_t place, uint64_t bytes) const {
    return fits(place, bytes) ? windows_[peer] + (place - 1) : nullptr;
  }
  // The same of any rank, this one's own, too.
  char* reach(uint32_t rank, uint64_t place, uint64_t bytes) const;
  // The same, mapped anew for whoever is to have them longer than the group lasts. Null, and *error = errno.
  char* map(uint32_t rank, uint64_t place, uint64_t bytes, int* error) const;
  static void unmap(char* mapped, uint64_t bytes);

 private:
  Arena* own() const { return own_.load(std::memory_order_acquire); }
  bool fits(uint64_t place, uint64_t bytes) const {
    return place && place - 1 <= size_ && bytes <= size_ - (place - 1);
  }
  bool map_windows();

  const int fd_;
  const uint32_t rank_, n_;
  const uint64_t at_, size_;  // of all; of one
  std::mutex mutex_;          // while the own one is made, or the others' are mapped
  std::atomic<Arena*> own_{nullptr};
  std::atomic<bool> has_windows_{false};
  std::vector<char*> windows_;  // all of them, or none; written before has_windows_
};

}  // namespace c10d_custom
