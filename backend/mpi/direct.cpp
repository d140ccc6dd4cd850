#include "direct.h"

#include <sched.h>

#include <cstring>

#include "../shm/os.h"
#include "../shm/reduce.h"
#include "board.h"

using namespace c10d_custom;

namespace {

constexpr uint32_t kMost = 64;
constexpr int kLooks = 16;  // between two at MPI, of a wait for this host's ranks: other transfers go on only inside MPI

enum Stage : uint32_t { kBegin, kInside, kBetween };

// `done` until it is not kPending, or for so long.
template <class Done>
int wait(const Direct* d, int64_t until, Done done) {
  for (int look = 1;; ++look) {
    if (const int st = done(); st != kPending) return st;
    if (look % kLooks == 0) {
      if (now_ns() > until) return kPending;
      int over = 0;
      if (d->idle && d->testall(1, d->idle, &over, d->statuses)) return kUsage;
    }
    sched_yield();
  }
}

Board board_of(const Direct* d) { return {d->board, d->stride, d->ranks}; }

int inputs(const Direct* d, DirectReduce* r) {
  const Board board = board_of(d);
  for (uint32_t i = 1; i < d->ranks; ++i)
    if (const Status st = board.look(i, r->head); st != kOk) return r->peer = int32_t(i), st;
  return kOk;
}

int result(const Direct* d, DirectReduce* r) {
  const Board board = board_of(d);
  r->peer = 0;
  const Status st = board.look_result(r->head);
  if (st == kOk) memcpy(r->data, board.payload(board.result()), r->head.payload);
  return st;
}

// Items to reduce: none where the call is only announced.
uint64_t items(const DirectReduce* r) { return r->head.payload ? r->head.count : 0; }

void reduce_inside(const Direct* d, DirectReduce* r) {
  const Board board = board_of(d);
  const void* payloads[kMost];
  double factors[kMost];
  payloads[0] = r->data;
  factors[0] = r->head.factor;
  for (uint32_t i = 1; i < d->ranks; ++i) payloads[i] = board.payload(i), factors[i] = board.factor(i);
  char* const message = d->between[d->own_between];
  memcpy(message, &r->head, sizeof r->head);
  reduce_kernel(r->head.dtype, r->inside_op)(message + sizeof(Head), payloads, d->ranks, items(r),
                                             r->inside_op == kPremulSum ? factors : r->inside_factor);
}

bool reduce_between(const Direct* d, DirectReduce* r) {
  const void* payloads[kMost];
  uint32_t received = 0;
  for (uint32_t i = 0; i < d->nbetween; ++i) {
    if (i != d->own_between) {
      r->peer = int32_t(received++);
      if (memcmp(d->between[i], &r->head, kCompared)) return false;
    }
    payloads[i] = d->between[i] + sizeof(Head);
  }
  reduce_kernel(r->head.dtype, r->between_op)(r->data, payloads, d->nbetween, items(r), r->between_factor);
  return true;
}

int exchanged(const Direct* d, DirectReduce* r, int64_t until) {
  for (;;) {
    int done = 0;
    if (d->testall(int(r->nrequests), r->requests, &done, d->statuses)) return kUsage;
    if (done) return kOk;
    if (now_ns() > until) return kPending;
    sched_yield();
  }
}

}  // namespace

void c10d_mpi_progress(void* context) {
  const Idle* idle = static_cast<const Idle*>(context);
  int done = 0;
  idle->testall(1, idle->request, &done, idle->status);
}

void c10d_board_call(void* board, uint64_t stride, uint32_t rank, const void* head) {
  Head h;
  memcpy(&h, head, sizeof h);
  Board(board, stride, 0).put(rank, h, nullptr, 0);
}

int c10d_direct_reduce(const Direct* d, DirectReduce* r, int64_t ns) {
  const int64_t until = now_ns() + ns;
  const bool leads = !d->local;
  switch (r->stage) {
    case kBegin:
      if (d->ranks > kMost || d->nbetween > kMost || !reduce_kernel(r->head.dtype, r->inside_op) ||
          !reduce_kernel(r->head.dtype, r->between_op))
        return kUsage;
      board_of(d).put(d->local, r->head, r->data, leads ? 0 : r->head.payload);
      r->stage = kInside;
      [[fallthrough]];
    case kInside:
      if (const int st = wait(d, until, [&] { return leads ? inputs(d, r) : result(d, r); }); st || !leads) return st;
      reduce_inside(d, r);
      if (d->startall(int(r->nrequests), r->requests)) return kUsage;
      r->stage = kBetween;
      [[fallthrough]];
    default:
      if (const int st = exchanged(d, r, until)) return st;
      if (!reduce_between(d, r)) return kMismatch;
      if (d->ranks > 1) board_of(d).put(d->ranks, r->head, r->data, r->head.payload);
      return kOk;
  }
}
