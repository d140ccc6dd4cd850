// How much memory this process can still get: what the machine has, and what its cgroups allow. Beyond a cgroup's limit
// the kernel kills instead of saying no, so whoever takes pages asks first.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace c10d_custom {

// Left to the program, which takes memory without asking.
constexpr uint64_t kSpare = 16 << 20;

class Room {
 public:
  // What is asked anew each time is how much is taken; the limits are those of now. `root`: where cgroups are mounted;
  // `cgroups`: which are this process's, as /proc tells it; `machine`: as /proc/meminfo.
  explicit Room(std::string root = "/sys/fs/cgroup", const char* cgroups = "/proc/self/cgroup",
                const char* machine = "/proc/meminfo");

  // Bytes, of the tightest, less the spare ones. File caches count as free; to ask for them takes the kernel a while:
  // not where there are `enough` bytes without, and then the answer is as many at least.
  uint64_t left(uint64_t enough) const;
  // Whose limit the last answer was: "the machine", "the cgroup /..."; "nobody".
  const std::string& whose() const { return whose_; }

  // The file by whose lock (flock) those decide one after the other who share these limits.
  const std::string& shared_by() const { return limits_.empty() ? machine_ : limits_.back().folder; }

 private:
  struct Limit {
    uint64_t bytes;
    std::string folder;
    const char *usage, *cache;  // its file that says how much is taken; what its memory.stat calls file caches
  };
  uint64_t of_machine(uint64_t enough) const;
  uint64_t tightest(uint64_t enough) const;
  static uint64_t of(const Limit&, uint64_t enough);

  const std::string machine_;
  std::vector<Limit> limits_;  // from the innermost outwards
  mutable std::string whose_;
};

// While it lives, no other process that shares these limits has one; unless a second passes in vain.
class RoomLock {
 public:
  explicit RoomLock(const Room&);
  ~RoomLock();
  RoomLock(const RoomLock&) = delete;
  RoomLock& operator=(const RoomLock&) = delete;

 private:
  int fd_;
};

}  // namespace c10d_custom
