// Ranks that are threads of one process share one mapping of their segment. ThreadSanitizer goes by addresses: with a
// mapping for each rank it would see no two ranks meet. Linked with --wrap=mmap,--wrap=munmap (Makefile).
#pragma once
#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>
#include <utility>

namespace one_mapping {

struct Mapping {
  void* base;
  unsigned users;
};
inline std::mutex mutex;
inline std::map<std::pair<ino_t, off_t>, Mapping> by_part;  // of a segment

}  // namespace one_mapping

extern "C" {
void* __real_mmap(void*, size_t, int, int, int, off_t);
int __real_munmap(void*, size_t);

void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  using namespace one_mapping;
  struct stat s;
  if (at || bytes == 4096 || fd < 0 || fstat(fd, &s)) return __real_mmap(at, bytes, protection, flags, fd, offset);
  std::lock_guard<std::mutex> hold(mutex);
  auto found = by_part.find({s.st_ino, offset});
  if (found == by_part.end())
    found = by_part.insert({{s.st_ino, offset}, {__real_mmap(at, bytes, protection, flags, fd, offset), 0}}).first;
  ++found->second.users;
  return found->second.base;
}

int __wrap_munmap(void* base, size_t bytes) {
  using namespace one_mapping;
  std::lock_guard<std::mutex> hold(mutex);
  for (auto it = by_part.begin(); it != by_part.end(); ++it) {
    if (it->second.base != base) continue;
    if (--it->second.users) return 0;
    by_part.erase(it);
    break;
  }
  return __real_munmap(base, bytes);
}
}
