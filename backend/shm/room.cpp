#include "room.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "waiting.h"

namespace c10d_custom {
namespace {

constexpr uint64_t kNoLimit = 1ull << 60;          // a cgroup's without one is a number near 2^63 (version 1), or "max"
constexpr int64_t kPatience = 1000 * 1000 * 1000;  // ns: with who holds the lock, perhaps stopped

std::string text(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  std::string all;
  char part[4096];
  for (ssize_t got; (got = read(fd, part, sizeof part)) > 0;) all.append(part, size_t(got));
  ::close(fd);
  return all;
}

// The number after `key` where a line begins with it; false: there is none.
bool number(const std::string& from, const char* key, uint64_t* value) {
  const size_t length = strlen(key);
  for (size_t line = 0; line < from.size(); line = from.find('\n', line) + 1) {
    if (!from.compare(line, length, key)) {
      const char* const at = from.c_str() + line + length;
      char* end;
      *value = strtoull(at, &end, 10);
      return end != at;
    }
    if (from.find('\n', line) == std::string::npos) break;
  }
  return false;
}

}  // namespace

Room::Room(std::string root, const char* cgroups, const char* machine) : machine_(machine) {
  const std::string own = text(cgroups);  // lines "number:controllers:path"
  for (size_t line = 0; line < own.size();) {
    const size_t end = std::min(own.find('\n', line), own.size());
    const size_t first = own.find(':', line), second = own.find(':', first + 1);
    if (second < end) {
      const std::string controllers = "," + own.substr(first + 1, second - first - 1) + ",";
      const std::string path = own.substr(second + 1, end - second - 1);
      if (!own.compare(line, first - line, "0"))
        on_the_way(root, path, "memory.max", "memory.current", "inactive_file ");
      else if (controllers.find(",memory,") != std::string::npos)
        on_the_way(root + "/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ");
    }
    line = end + 1;
  }
}

// The limits of the cgroup and of those it is in; inside a container, what is to be seen of them.
void Room::on_the_way(const std::string& root, std::string path, const char* limit, const char* usage,
                      const char* cache) {
  while (!path.empty() && path.back() == '/') path.pop_back();
  for (;;) {
    const std::string folder = root + path;
    uint64_t most;
    if (number(text(folder + "/" + limit), "", &most) && most < kNoLimit)
      limits_.push_back({most, folder, usage, cache});
    const size_t up = path.rfind('/');
    if (up == std::string::npos) return;
    path.resize(up);
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
  uint64_t kib;
  return number(text(machine_), "MemAvailable:", &kib) ? kib << 10 : INT64_MAX;
}

uint64_t Room::of(const Limit& limit, uint64_t enough) {
  uint64_t taken, cached;
  if (!number(text(limit.folder + "/" + limit.usage), "", &taken)) return INT64_MAX;
  const uint64_t free = limit.bytes - std::min(limit.bytes, taken);
  if (free >= enough || !number(text(limit.folder + "/memory.stat"), limit.cache, &cached)) return free;
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
