#include "room.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>

#include "cgroups.h"
#include "waiting.h"

namespace c10d_custom {
namespace {

constexpr uint64_t kNoLimit = 1ull << 60;          // a cgroup's without one is a number near 2^63 (version 1), or "max"
constexpr int64_t kPatience = 1000 * 1000 * 1000;  // ns: with who holds the lock, perhaps stopped

}  // namespace

Room::Room(std::string root, const char* cgroups, const char* machine) : machine_(machine) {
  for (const Cgroup& each : own_cgroups(root, cgroups, "memory")) {
    const char* const limit = each.version_1 ? "memory.limit_in_bytes" : "memory.max";
    const char* const usage = each.version_1 ? "memory.usage_in_bytes" : "memory.current";
    const char* const cache = each.version_1 ? "total_inactive_file " : "inactive_file ";
    uint64_t most = 0;
    if (number_after(file_text(each.folder + "/" + limit), "", &most) && most < kNoLimit)
      limits_.push_back({most, each.folder, usage, cache});
  }
}

uint64_t Room::left(uint64_t enough) const {
  const uint64_t all = tightest(enough > UINT64_MAX - kSpare ? enough : enough + kSpare);
  return all - std::min(all, kSpare);
}

uint64_t Room::tightest(uint64_t enough) const {
  uint64_t least = of_machine(enough);
  whose_ = least >= kNoLimit ? "nobody" : "the machine";
  for (const Limit& limit : limits_)
    if (const uint64_t free = of(limit, enough); free < least) least = free, whose_ = "the cgroup " + limit.folder;
  return least;
}

uint64_t Room::of_machine(uint64_t enough) const {
  struct sysinfo info;
  if (machine_ == "/proc/meminfo" && !sysinfo(&info))
    if (const uint64_t unused = uint64_t(info.freeram) * info.mem_unit; unused >= enough) return unused;
  uint64_t kib = 0;
  return number_after(file_text(machine_), "MemAvailable:", &kib) ? kib << 10 : INT64_MAX;
}

uint64_t Room::of(const Limit& limit, uint64_t enough) {
  uint64_t taken = 0, cached = 0;
  if (!number_after(file_text(limit.folder + "/" + limit.usage), "", &taken)) return INT64_MAX;
  const uint64_t free = limit.bytes - std::min(limit.bytes, taken);
  if (free >= enough || !number_after(file_text(limit.folder + "/memory.stat"), limit.cache, &cached)) return free;
  return free + cached;
}

RoomLock::RoomLock(const Room& room) : fd_(::open(room.shared_by().c_str(), O_RDONLY | O_CLOEXEC)) {
  const int64_t until = now_ns() + kPatience;
  while (fd_ >= 0 && flock(fd_, LOCK_EX | LOCK_NB) && (errno == EWOULDBLOCK || errno == EINTR) && now_ns() < until)
    rest_between_rare_looks();
}

RoomLock::~RoomLock() {
  if (fd_ < 0) return;
  flock(fd_, LOCK_UN);  // a process forked meanwhile has it, too
  ::close(fd_);
}

}  // namespace c10d_custom
