#include "direct.h"

#include <sched.h>

#include <cstring>
#include <vector>

#include "../shm/api.h"
#include "../shm/os.h"
#include "../shm/reduce.h"

using namespace c10d_custom;

namespace {
constexpr size_t kCompared = offsetof(Head, payload);
}

void c10d_mpi_progress(void* context) {
  const Idle* idle = static_cast<const Idle*>(context);
  int done = 0;
  idle->testall(1, idle->request, &done, idle->status);
}

int c10d_direct_reduce(const Direct* d, const DirectReduce* r, int64_t ns, int32_t* peer) {
  char* mine = d->slots[d->me];
  memcpy(mine, &r->head, sizeof r->head);
  memcpy(mine + sizeof(Head), r->data, r->head.payload);
  if (d->startall(int(r->nrequests), r->requests)) return kUsage;
  const int64_t until = now_ns() + ns;
  for (;;) {
    int done = 0;
    if (d->testall(int(r->nrequests), r->requests, &done, d->statuses)) return kUsage;
    if (done) return c10d_direct_finish(d, r, peer);
    if (now_ns() > until) return kPending;
    sched_yield();
  }
}

int c10d_direct_finish(const Direct* d, const DirectReduce* r, int32_t* peer) {
  const char* mine = d->slots[d->me];
  for (uint32_t p = 0; p < d->ranks; ++p)
    if (memcmp(mine, d->slots[p], kCompared)) return *peer = int32_t(p), kMismatch;
  const ReduceFn inside = reduce_kernel(r->head.dtype, r->inside), between = reduce_kernel(r->head.dtype, r->between);
  if (!inside || !between) return kUsage;
  const uint32_t* member = d->members;
  std::vector<const void*> sources(d->ranks);
  for (uint32_t h = 0; h < d->hosts; ++h) {
    const uint32_t count = d->member_counts[h];
    for (uint32_t i = 0; i < count; ++i) sources[i] = d->slots[member[i]] + sizeof(Head);
    inside(d->partials[h], sources.data(), count, r->head.count, r->inside_factor);
    member += count;
  }
  for (uint32_t h = 0; h < d->hosts; ++h) sources[h] = d->partials[h];
  between(r->data, sources.data(), d->hosts, r->head.count, r->between_factor);
  return kOk;
}
