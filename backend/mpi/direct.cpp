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

enum Stage : uint32_t { kBegin, kInside, kCombineInside, kBetween, kCombineBetween, kOut };

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

bool start(const Direct* d, const DirectReduce* r, int round) {
  return !r->nrequests[round] || !d->startall(int(r->nrequests[round]), r->requests[round]);
}

int wait(const Direct* d, const DirectReduce* r, int round, int64_t until) {
  return r->nrequests[round] ? complete(d, r->requests[round], r->nrequests[round], until) : kOk;
}

bool same(DirectReduce* r, const char* message, uint32_t index) {
  r->peer = int32_t(index);
  return !memcmp(message, &r->head, kCompared);
}

void put(char* message, const Head& head, const void* payload) {
  memcpy(message, &head, sizeof head);
  memcpy(message + sizeof head, payload, head.payload);
}

// These two return false if message r->peer belongs to another call.
bool combine_inside(const Direct* d, DirectReduce* r) {
  const void* payloads[kMost];
  double factors[kMost];
  payloads[d->own_inside] = r->data;
  factors[d->own_inside] = r->head.factor;
  for (uint32_t i = 0; i < d->ninside; ++i) {
    if (!same(r, d->inside[i], i)) return false;
    const uint32_t at = i < d->own_inside ? i : i + 1;
    payloads[at] = d->inside[i] + sizeof(Head);
    factors[at] = reinterpret_cast<const Head*>(d->inside[i])->factor;
  }
  char* const result = d->between[d->own_between];
  memcpy(result, &r->head, sizeof r->head);
  reduce_kernel(r->head.dtype, r->inside_op)(result + sizeof(Head), payloads, d->ninside + 1, r->head.count,
                                             r->inside_op == kPremulSum ? factors : r->inside_factor);
  return true;
}

bool combine_between(const Direct* d, DirectReduce* r) {
  const void* payloads[kMost];
  uint32_t received = 0;
  for (uint32_t i = 0; i < d->nbetween; ++i) {
    if (i != d->own_between && !same(r, d->between[i], received++)) return false;
    payloads[i] = d->between[i] + sizeof(Head);
  }
  reduce_kernel(r->head.dtype, r->between_op)(r->data, payloads, d->nbetween, r->head.count, r->between_factor);
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
  switch (r->stage) {
    case kBegin:
      if (d->ninside >= kMost || d->nbetween > kMost || !reduce_kernel(r->head.dtype, r->inside_op) ||
          !reduce_kernel(r->head.dtype, r->between_op))
        return kUsage;
      if (!r->nrequests[2]) put(d->out, r->head, r->data);
      if (!start(d, r, 0)) return kUsage;
      r->stage = kInside;
      [[fallthrough]];
    case kInside:
      if (const int st = wait(d, r, 0, until)) return st;
      r->stage = kCombineInside;
      [[fallthrough]];
    case kCombineInside:
      if (!d->leads) {
        if (!same(r, d->inside[0], 0)) return kMismatch;
        memcpy(r->data, d->inside[0] + sizeof(Head), r->head.payload);
        return kOk;
      }
      if (!combine_inside(d, r)) return kMismatch;
      if (!start(d, r, 1)) return kUsage;
      r->stage = kBetween;
      [[fallthrough]];
    case kBetween:
      if (const int st = wait(d, r, 1, until)) return st;
      r->stage = kCombineBetween;
      [[fallthrough]];
    case kCombineBetween:
      if (!combine_between(d, r)) return kMismatch;
      if (!r->nrequests[2]) return kOk;
      put(d->out, r->head, r->data);
      if (!start(d, r, 2)) return kUsage;
      r->stage = kOut;
      [[fallthrough]];
    default:
      return wait(d, r, 2, until);
  }
}
