#include "direct.h"

#include <sched.h>

#include <cstddef>
#include <cstring>

#include "../shm/api.h"
#include "../shm/os.h"
#include "../shm/reduce.h"

using namespace c10d_custom;

namespace {

constexpr size_t kCompared = offsetof(Head, payload);
constexpr uint32_t kMost = 64;

enum Stage : uint32_t { kBegin, kInside, kCombineInside, kBetween, kCombineBetween };

// kOk, kPending or kUsage.
int complete(const Direct* d, void* requests, uint32_t n, int64_t until) {
  for (;;) {
    int done = 0;
    if (d->testall(int(n), requests, &done, d->statuses)) return kUsage;
    if (done) return kOk;
    if (now_ns() > until) return kPending;
    sched_yield();
  }
}

// False: message r->peer belongs to another call.
bool combine(DirectReduce* r, char* const* messages, uint32_t n, uint32_t redop, const double* factor, void* target) {
  const void* payloads[kMost];
  double factors[kMost];
  for (uint32_t i = 0; i < n; ++i) {
    if (memcmp(messages[i], &r->head, kCompared)) return r->peer = int32_t(i), false;
    payloads[i] = messages[i] + sizeof(Head);
    factors[i] = reinterpret_cast<const Head*>(messages[i])->factor;
  }
  if (redop == kPremulSum) factor = factors;
  reduce_kernel(r->head.dtype, redop)(target, payloads, n, r->head.count, factor);
  return true;
}

}  // namespace

void c10d_mpi_progress(void* context) {
  const Idle* idle = static_cast<const Idle*>(context);
  int done = 0;
  idle->testall(1, idle->request, &done, idle->status);
}

int c10d_direct_reduce(const Direct* d, DirectReduce* r, int64_t ns) {
  const int64_t until = now_ns() + ns;
  char* const own = d->inside[d->own_inside];
  char* const result = d->between[d->own_between];
  switch (r->stage) {
    case kBegin:
      if (d->ninside > kMost || d->nbetween > kMost || !reduce_kernel(r->head.dtype, r->inside_op) ||
          !reduce_kernel(r->head.dtype, r->between_op))
        return kUsage;
      memcpy(own, &r->head, sizeof r->head);
      memcpy(own + sizeof(Head), r->data, r->head.payload);
      if (r->ninside_requests && d->startall(int(r->ninside_requests), r->inside_requests)) return kUsage;
      r->stage = kInside;
      [[fallthrough]];
    case kInside:
      if (const int st = complete(d, r->inside_requests, r->ninside_requests, until)) return st;
      r->stage = kCombineInside;
      [[fallthrough]];
    case kCombineInside:
      if (!combine(r, d->inside, d->ninside, r->inside_op, r->inside_factor, result + sizeof(Head))) return kMismatch;
      memcpy(result, &r->head, sizeof r->head);
      if (d->startall(int(r->nbetween_requests), r->between_requests)) return kUsage;
      r->stage = kBetween;
      [[fallthrough]];
    case kBetween:
      if (const int st = complete(d, r->between_requests, r->nbetween_requests, until)) return st;
      r->stage = kCombineBetween;
      [[fallthrough]];
    default:
      return combine(r, d->between, d->nbetween, r->between_op, r->between_factor, r->data) ? kOk : kMismatch;
  }
}
