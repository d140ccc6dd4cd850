// On which NUMA node the pages lie that each rank writes to: on its own, by two calls of ranks that are processes bound
// to one core each. Where there is one node, there is nothing to be seen; scripts/numa_machine makes a machine of two.
#include <errno.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../shm/api.h"
#include "../shm/layout.h"
#include "../shm/reduce.h"
#include "../shm/topology.h"
#include "require.h"

using namespace c10d_custom;

namespace {

constexpr int64_t kMinutes = 600ll * 1000 * 1000 * 1000;

void all_reduce(c10d_handle* g, uint32_t me, uint32_t n, uint64_t bytes) {
  std::vector<int32_t> values(bytes / 4, int32_t(me));
  const Span all{values.data(), bytes};
  CallArgs a{};
  a.op = kAllReduce, a.redop = kSum, a.dtype = kInt32, a.root = -1, a.item_bytes = 4, a.count = bytes / 4;
  a.timeout_ns = kMinutes, a.nin = a.nout = 1, a.in = a.out = &all;
  const int status = c10d_run(g, &a);
  require(!status, "a call failed", status);
  require(values.back() == int32_t(n * (n - 1) / 2), "a wrong element", values.back());
}

// The kernel's number of the node that a page lies on; the page is looked at first, or this process has none there.
long node_of(const char* at) {
  (void)*const_cast<const volatile char*>(at);
  void* page = const_cast<char*>(at);
  int node = -1;
  require(!syscall(SYS_move_pages, 0, 1ul, &page, nullptr, &node, 0), "move_pages", errno);
  return node;
}

void require_on(const char* what, const char* from, uint64_t bytes, long node) {
  for (uint64_t at = 0; at < bytes; at += 4096)
    if (const long found = node_of(from + at); found != node) require(false, what, found);
}

unsigned own_node() {
  unsigned cpu, node;
  require(!syscall(SYS_getcpu, &cpu, &node, nullptr), "getcpu", errno);
  return node;
}

void rank(int fd, const Layout& layout, uint32_t cpu, uint32_t me, uint32_t n) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  require(!sched_setaffinity(0, sizeof one, &one), "cannot be bound to a core", long(cpu));
  c10d_handle* g;
  require(!c10d_open(fd, me, 200 * 1000, nullptr, &g), "cannot open", me);
  all_reduce(g, me, n, 4096);
  all_reduce(g, me, n, 4 << 20);
  const char* const base = static_cast<char*>(c10d_call_slots(g)) - layout.call_slots;
  require_on("node of a slot", base + layout.small + me * 2 * layout.small_bytes, 2 * layout.small_bytes, own_node());
  require_on("node of a ring", base + layout.rings + me * layout.ring_bytes, layout.ring_bytes, own_node());
  all_reduce(g, me, n, 4);
  c10d_close(g);
}

}  // namespace

int main() {
  const Topology& here = Topology::here();
  if (here.nodes() < 2) return std::puts("nodes_test: one node"), 0;
  // The first and the last core of each node.
  std::vector<uint32_t> cpus;
  for (uint32_t node = 0; node < here.nodes(); ++node) {
    std::vector<uint32_t> of;
    for (const CpuPlace& place : here.cpus())
      if (place.node == node && place.cpu < CPU_SETSIZE) of.push_back(place.cpu);
    if (!of.empty()) cpus.push_back(of.front());
    if (of.size() > 1) cpus.push_back(of.back());
  }
  const auto n = uint32_t(cpus.size());
  const Geometry geometry{n, 8, std::max(128u << 10, 4096 * ((64 * n + 4095) / 4096)), 16 << 10, 32 << 10, 4, 0, 0};
  const Layout layout(geometry);
  uint64_t total;
  const int fd = c10d_segment_create(&geometry, &total);
  require(fd >= 0, "no segment", fd);
  for (uint32_t r = 0; r < n; ++r)
    if (!fork()) rank(fd, layout, cpus[r], r, n), _exit(0);
  for (uint32_t r = 0; r < n; ++r) {
    int how;
    require(wait(&how) > 0 && !how, "how a rank ended", how);
  }
  std::printf("nodes_test: ok, %u ranks on %u nodes\n", n, here.nodes());
}
