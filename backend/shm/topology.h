// Which cores of this machine are near each other: as the kernel tells it under /sys, for those this process may run
// on.
//
// Read once, at some 10 files for each last-level cache. Containers, and processes bound to some cores, see the part
// they may run on. Where nothing is known there is one cache, one node, one socket, and the cache's size is 0.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace c10d_custom {

// One core as the kernel counts them (two threads of a core are two). Caches, nodes and sockets are numbered from 0 by
// the first cpu that they have here, without gaps.
struct CpuPlace {
  uint32_t cpu;
  uint32_t cache, node, socket;
  uint64_t cache_bytes;  // of its last-level cache; 0: not known
};

class Topology {
 public:
  // Of the calling thread's affinity mask. Kept; for the core.
  static const Topology& here();

  // sys: where /sys is mounted. cpus: that count; empty: all that are online.
  static Topology read(const std::string& sys, std::vector<uint32_t> cpus);

  const std::vector<CpuPlace>& cpus() const { return cpus_; }  // by rising `cpu`; at least one
  uint32_t caches() const { return caches_; }
  uint32_t nodes() const { return nodes_; }
  uint32_t sockets() const { return sockets_; }

  // Bytes of the last-level caches of so many ranks that sit as close together as they can; of all where there are
  // more ranks than cpus. 0: not known.
  uint64_t cache_bytes(uint32_t ranks) const;

 private:
  std::vector<CpuPlace> cpus_;
  uint32_t caches_ = 1, nodes_ = 1, sockets_ = 1;
};

// Bytes of last-level cache that a group of so many ranks can count on: of here(), or, where this rank alone is bound
// to fewer cpus than there are ranks, of the whole machine. 0: not known. Ranks that are bound each to its own cpus may
// be told different sizes: one of them decides for all.
uint64_t group_cache_bytes(uint32_t ranks);

// The cpus that a process's first thread may run on, 0: the calling thread; rising; empty: not known.
std::vector<uint32_t> allowed_cpus(uint32_t pid = 0);

// Numbers in the kernel's form for lists, as "0-3,8,10-11", rising; what cannot be read ends it.
std::vector<uint32_t> parse_cpu_list(const std::string& text);

}  // namespace c10d_custom
