#include "leader_all_reduce.h"

#include <pthread.h>

#include <cstring>

#include "../shm/api.h"
#include "../shm/os.h"
#include "../shm/reduce.h"
#include "mpi_driver.h"
#include "../shm/waiting.h"

using namespace c10d_custom;

namespace {

constexpr uint32_t kMost = 64;
// Between two looks at MPI, of a wait for this host's ranks: other transfers go on only inside MPI.
constexpr int kLooks = 16;

enum Step : uint32_t { kBegin, kInside, kBetween };

constexpr int64_t kStopped = 1000 * 1000 * 1000;  // ns over the time given: more than a busy machine takes

// `done` until it is not kPending, or for so long from `now` on.
template <class Done>
int wait(const LeaderAllReduce* d, const LeaderCall* r, int64_t now, int64_t until, Done done) {
  int64_t waited = now - r->since;
  for (int look = 1;; ++look) {
    if (const int st = done(); st != kPending) return st;
    if (waited >= awake_over_mpi(d->awake_ns) || look % kLooks == 0) {
      now = now_ns();
      if (now > until) return kPending;
      waited = now - r->since;
      mpi_is_called();
      int over = 0;
      if (d->idle && d->testall(1, d->idle, &over, d->statuses)) return kUsage;
    }
    rest_between_looks(waited, awake_over_mpi(d->awake_ns));
  }
}

CallSlots call_slots_of(const LeaderAllReduce* d) { return {d->call_slots, d->stride, d->ranks}; }

int inputs(const LeaderAllReduce* d, LeaderCall* r) {
  const CallSlots slots = call_slots_of(d);
  for (uint32_t i = 1; i < d->ranks; ++i)
    if (const Status st = slots.look(i, r->header); st != kOk) return r->peer = int32_t(i), st;
  return kOk;
}

int result(const LeaderAllReduce* d, LeaderCall* r) {
  const CallSlots slots = call_slots_of(d);
  r->peer = 0;
  const Status st = slots.look_result(r->header);
  if (st == kOk) memcpy(r->data, slots.payload(slots.result()), r->header.payload);
  return st;
}

// Items to reduce: none where the call is only announced.
uint64_t items(const LeaderCall* r) { return r->header.payload ? r->header.count : 0; }

void reduce_inside(const LeaderAllReduce* d, LeaderCall* r) {
  const CallSlots slots = call_slots_of(d);
  const void* payloads[kMost];
  double factors[kMost];
  payloads[0] = r->data;
  factors[0] = r->header.factor;
  for (uint32_t i = 1; i < d->ranks; ++i) payloads[i] = slots.payload(i), factors[i] = slots.factor(i);
  char* const message = d->between[d->own_between];
  memcpy(message, &r->header, sizeof r->header);
  reduce_kernel(r->header.dtype, r->inside_op)(message + sizeof(CallHeader), payloads, d->ranks, items(r),
                                               r->inside_op == kPremulSum ? factors : r->inside_factor);
}

bool reduce_between(const LeaderAllReduce* d, LeaderCall* r) {
  const void* payloads[kMost];
  uint32_t received = 0;
  for (uint32_t i = 0; i < d->nbetween; ++i) {
    if (i != d->own_between) {
      r->peer = int32_t(received++);
      if (memcmp(d->between[i], &r->header, kCompared)) return false;
    }
    payloads[i] = d->between[i] + sizeof(CallHeader);
  }
  reduce_kernel(r->header.dtype, r->between_op)(r->data, payloads, d->nbetween, items(r), r->between_factor);
  return true;
}

int exchanged(const LeaderAllReduce* d, LeaderCall* r, int64_t until) {
  for (;;) {
    mpi_is_called();
    int done = 0;
    if (d->testall(int(r->nrequests), r->requests, &done, d->statuses)) return kUsage;
    if (done) return kOk;
    const int64_t now = now_ns();
    if (now > until) return kPending;
    rest_between_looks(now - r->since, awake_over_mpi(d->awake_ns));
  }
}

void log_begin(LeaderFastPath* q, const CallHeader& h) {
  if (!q->room) return;
  const TraceRecord r{0,         h.op, h.redop,  h.dtype,  h.root, h.count,  h.payload,
                      h.payload, 0,    q->began, q->began, 0,      kPending, 0};
  TraceRecord* const to = q->log + q->logged++ % q->room;
  store_words(to, &r, sizeof r);
  __atomic_store_n(&to->number, h.number, __ATOMIC_RELEASE);
}

}  // namespace

int c10d_failure_news_came(const FailureNews* news) { return has_come(news); }

void c10d_mpi_progress(void* context) {
  const Idle* idle = static_cast<const Idle*>(context);
  int done = 0;
  mpi_is_called();
  idle->testall(1, idle->request, &done, idle->status);
}

void c10d_put_call(void* slots, uint64_t stride, uint32_t rank, const void* header) {
  CallHeader h;
  memcpy(&h, header, sizeof h);
  CallSlots(slots, stride, 0).put(rank, h, nullptr, 0);
}

int c10d_leader_all_reduce(const LeaderAllReduce* d, LeaderCall* r, int64_t ns) {
  const int64_t now = now_ns(), until = now + ns;
  const bool leads = !d->local;
  switch (r->step) {
    case kBegin:
      if (d->ranks > kMost || d->nbetween > kMost || !reduce_kernel(r->header.dtype, r->inside_op) ||
          !reduce_kernel(r->header.dtype, r->between_op))
        return kUsage;
      call_slots_of(d).put(d->local, r->header, r->data, leads ? 0 : r->header.payload);
      r->step = kInside;
      r->since = now;
      [[fallthrough]];
    case kInside:
      if (!leads) return wait(d, r, now, until, [&] { return result(d, r); });
      if (const int st = wait(d, r, now, until, [&] {
            const int ready = inputs(d, r);
            return ready == kOk && has_come(d->failure_news) ? kPending : ready;
          }))
        return st;
      // Not in a process that was stopped meanwhile: the peers may be gone, and starting a transfer to one that is may
      // crash in MPI. Whoever called this first looks whether the group is still there.
      r->since = now_ns();
      if (r->since > until + kStopped) return kPending;
      reduce_inside(d, r);
      transfer_begins();
      if (d->startall(int(r->nrequests), r->requests)) return kUsage;
      r->step = kBetween;
      [[fallthrough]];
    default:
      if (const int st = exchanged(d, r, until)) return st;
      if (!reduce_between(d, r)) return kMismatch;
      if (d->ranks > 1) call_slots_of(d).put(d->ranks, r->header, r->data, r->header.payload);
      return kOk;
  }
}

int c10d_leader_fast_path(LeaderFastPath* q, uint64_t kind, int32_t, void* in, void* out, uint64_t count, int64_t ns) {
  const uint32_t dtype = kind & 0xff, redop = kind >> 8 & 0xff;
  if (kind >> 24 != kAllReduce || in != out || count > q->limit || q->stopped.load(std::memory_order_acquire))
    return kSlowPath;
  const uint64_t bytes = count * (kind >> 16 & 0xff);
  if (bytes > q->limit) return kSlowPath;
  uint32_t length = 0;
  while (bytes > q->lengths[length]) ++length;
  LeaderCall* const r = q->calls[(dtype * kRedopRoom + redop) * kLengths + length];
  const uint64_t number = r ? q->sequencer.take() : 0;
  if (!number) return kSlowPath;
  q->runner.store(pthread_self(), std::memory_order_relaxed);
  q->now = r;
  q->began = now_ns();
  r->header.number = number, r->header.count = count, r->header.payload = bytes, r->header.factor = 0;
  r->data = in, r->step = 0;
  log_begin(q, r->header);
  const int status = c10d_leader_all_reduce(q->way, r, ns);
  return status ? status : c10d_leader_fast_path_over(q, kOk);
}

int c10d_leader_fast_path_over(LeaderFastPath* q, int status) {
  if (q->room) {
    TraceRecord& r = q->log[(q->logged - 1) % q->room];
    __atomic_store_n(&r.ended, now_ns(), __ATOMIC_RELAXED);
    __atomic_store_n(&r.status, status, __ATOMIC_RELAXED);
  }
  q->now = nullptr;
  q->runner.store(0, std::memory_order_relaxed);
  return q->sequencer.free() ? kDoneWake : kOk;
}

uint64_t c10d_leader_fast_path_log(const LeaderFastPath* q, TraceRecord* out) {
  uint64_t n = 0;
  for (uint64_t i = 0; i < q->room; ++i) {
    const TraceRecord& r = q->log[i];
    load_words(out + n, &r, sizeof r);
    n += out[n].number && __atomic_load_n(&r.number, __ATOMIC_RELAXED) == out[n].number;
  }
  return n;
}
