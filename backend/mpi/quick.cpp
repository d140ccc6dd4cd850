#include "quick.h"

#include <pthread.h>

#include "../shm/os.h"
#include "words.h"

using namespace c10d_custom;

namespace {

void log_begin(DirectQuick* q, const Head& head) {
  if (!q->room) return;
  const TraceRecord r{0, head.op, head.redop, head.dtype, head.root, head.count, head.payload, head.payload,
                      0, q->began, q->began, 0, kPending, 0};
  TraceRecord* const to = q->log + q->logged++ % q->room;
  store_words(to, &r, sizeof r);
  __atomic_store_n(&to->number, head.number, __ATOMIC_RELEASE);
}

}  // namespace

int c10d_direct_quick(DirectQuick* q, void* data, uint64_t count, uint32_t kind, int64_t ns) {
  const uint32_t dtype = kind & 0xff, redop = kind >> 8 & 0xff;
  if (count > q->limit || q->stopped.load(std::memory_order_acquire)) return kLongWay;
  const uint64_t bytes = count * (kind >> 16);
  if (bytes > q->limit) return kLongWay;
  uint32_t length = 0;
  while (bytes > q->lengths[length]) ++length;
  DirectReduce* const r = q->calls[(dtype * kRedopRoom + redop) * kLengths + length];
  const uint64_t number = r ? q->turn.take() : 0;
  if (!number) return kLongWay;
  q->runner.store(pthread_self(), std::memory_order_relaxed);
  q->now = r;
  q->began = now_ns();
  r->head.number = number, r->head.count = count, r->head.payload = bytes, r->head.factor = 0;
  r->data = data, r->stage = 0;
  log_begin(q, r->head);
  const int status = c10d_direct_reduce(q->way, r, ns);
  return status ? status : c10d_direct_over(q, kOk);
}

int c10d_direct_over(DirectQuick* q, int status) {
  if (q->room) {
    TraceRecord& r = q->log[(q->logged - 1) % q->room];
    __atomic_store_n(&r.ended, now_ns(), __ATOMIC_RELAXED);
    __atomic_store_n(&r.status, status, __ATOMIC_RELAXED);
  }
  q->now = nullptr;
  q->runner.store(0, std::memory_order_relaxed);
  return q->turn.free() ? kDoneWake : kOk;
}

uint64_t c10d_direct_log(const DirectQuick* q, TraceRecord* out) {
  uint64_t n = 0;
  for (uint64_t i = 0; i < q->room; ++i) {
    const TraceRecord& r = q->log[i];
    load_words(out + n, &r, sizeof r);
    n += out[n].number && __atomic_load_n(&r.number, __ATOMIC_RELAXED) == out[n].number;
  }
  return n;
}
