// A window: memory of each rank's arena that the others write to, and read, without it (docs/windows.md).
//
// Between each two ranks, both ways, there is a Signal: how many times one has signalled the other. They lie in a block
// of the receiver's arena, one for each sender, in rank order. Each has one writer, its sender, who writes them after
// its data: `signal` is a release of all that its thread has put, and of all that it has read in its own memory;
// `await` acquires it. Between those a put is a copy.
//
// Each signal is waited for once: a wait takes the next number of its sender that nobody waits for, and gives it back
// if it fails. So waits that are begun in one order see puts in that order, and a wait that timed out has used nothing
// up.
#pragma once
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "group.h"

namespace c10d_custom {

class Window {
 public:
  // Null where a part is not in its rank's arena. Lives no longer than the group; the parts as long as the window, on
  // all ranks.
  static std::unique_ptr<Window> open(Group&, const WindowPart* parts);

  // Any thread may call, with a peer of the group.
  Status put(uint32_t peer, uint32_t dtype, const void* from, uint64_t count, uint64_t offset);
  Status signal(uint32_t peer);
  // The number of the next signal of that rank that nobody waits for; or of one given back.
  uint64_t claim(uint32_t peer);
  void give_back(uint32_t peer, uint64_t number);
  // As Group::wait.
  Status await(uint32_t peer, uint64_t number, int64_t deadline);

 private:
  struct Side {  // of one rank
    char* data;
    uint64_t items;
    uint32_t dtype, item_bytes;
    Signal* to;    // from this rank to it
    Signal* from;  // from it to this rank
    uint64_t sent = 0, claimed = 0;
    std::set<uint64_t> given_back{};
  };
  explicit Window(Group& g) : g_(g) {}
  void write(char* to, const char* from, uint64_t bytes);

  Group& g_;
  std::mutex copy_mutex_;  // of whom CopyIn serves; who finds it held copies without
  CopyIn copy_in_;
  std::mutex mutex_;  // of what the sides count
  std::vector<Side> sides_;
};

}  // namespace c10d_custom
