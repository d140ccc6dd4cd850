// Ranks that are threads of one process share one mapping of their segment. ThreadSanitizer goes by addresses: with a
// mapping for each rank it would see no two ranks meet. Linked with --wrap=mmap,--wrap=munmap (Makefile).
#pragma once
#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>

namespace one_mapping {

struct Mapping {
  void* base;
  unsigned users;
};
inline std::mutex mutex;
inline std::map<ino_t, Mapping> by_segment;

}  // namespace one_mapping

extern "C" {
void* __real_mmap(void*, size_t, int, int, int, off_t);
int __real_munmap(void*, size_t);

void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  using namespace one_mapping;
  struct stat s;
  if (bytes == 4096 || fd < 0 || fstat(fd, &s)) return __real_mmap(at, bytes, protection, flags, fd, offset);
  std::lock_guard<std::mutex> hold(mutex);
  auto found = by_segment.find(s.st_ino);
  if (found == by_segment.end())
    found = by_segment.insert({s.st_ino, {__real_mmap(at, bytes, protection, flags, fd, offset), 0}}).first;
  ++found->second.users;
  return found->second.base;
}

int __wrap_munmap(void* base, size_t bytes) {
  using namespace one_mapping;
  std::lock_guard<std::mutex> hold(mutex);
  for (auto it = by_segment.begin(); it != by_segment.end(); ++it) {
    if (it->second.base != base) continue;
    if (--it->second.users) return 0;
    by_segment.erase(it);
    break;
  }
  return __real_munmap(base, bytes);
}
}
