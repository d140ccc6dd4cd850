// A small all_reduce over hosts. Each host's first rank, its leader, reduces the inputs of its host, which it finds in
// the call slots; exchanges the result with the other leaders; reduces again; and puts up what comes of it for its
// host.
//
// MPI is known here only as two function pointers and opaque requests: this code is linked with no MPI, and serves any.
// The messages are persistent requests that Python has made. Each begins with a CallHeader.
#pragma once
#include "failure_news.h"
#include "../shm/api.h"
#include "call_slots.h"
#include "sequencer.h"

namespace c10d_custom {

struct LeaderAllReduce {
  int (*startall)(int, void*);
  int (*testall)(int, void*, int*, void*);
  void* statuses;  // room for one of any MPI for each request
  void* idle;      // a request that is never fulfilled, to be tested for the sake of the others; or null
  void* call_slots;
  uint64_t stride;        // bytes of one
  uint32_t ranks, local;  // of this host; this rank's place among them
  char* const* between;   // the messages with the hosts' results, in order; one is this host's own
  uint32_t nbetween, own_between;
  const FailureNews* failure_news;  // or null
  int64_t awake_ns;                 // C10D_CUSTOM_SPIN_US
};

struct LeaderCall {
  CallHeader header;
  void* data;  // input and result; with no payload nothing is reduced: the ranks only agree to call alike
  const double* inside_factor;  // see reduce.h
  const double* between_factor;
  void* requests;  // between hosts; the leaders have some
  uint32_t nrequests;
  uint32_t inside_op, between_op;  // reduce ops
  uint32_t step;  // 0 to begin; advanced by c10d_leader_all_reduce: 1 while it waits for its host, 2 for others
  int32_t peer;   // kMismatch: the rank of the host whose call differs; in stage 2 the index of the message, among
                  // those received
  int64_t since;  // ns, as of now_ns(): when it came to its step
};

// A request that is never fulfilled, to be tested for the sake of the others.
struct Idle {
  int (*testall)(int, void*, int*, void*);
  void* request;
  void* status;
};

// --- the fast path: what is to be done before and after such a call, in one. What Python takes for that is many times
// as long, and where ranks share a core it is paid by one after the other.

constexpr uint32_t kLengths = 5;     // of payloads, for each of which there are requests
constexpr uint32_t kRedopRoom = 16;  // more than there are

// Of one group, in Python's memory.
struct LeaderFastPath {
  Sequencer sequencer;
  std::atomic<uint64_t> runner;   // the thread (pthread_self) that is in a call; 0: none
  std::atomic<uint32_t> stopped;  // the group is of no more use
  uint32_t limit;                 // bytes of the largest tensor
  uint64_t lengths[kLengths];     // ascending, the last at least `limit`
  const LeaderAllReduce* way;
  LeaderCall* const* calls;  // at [dtype][redop][index of the length]; null: not prepared
  LeaderCall* now;           // the call under way
  int64_t began;
  // The last calls. A record whose number is 0 is being written.
  TraceRecord* log;
  uint64_t logged, room;
};

}  // namespace c10d_custom

// See failure_news.h.
C10D_API int c10d_failure_news_came(const c10d_custom::FailureNews*);
// Lets MPI make progress. The context is an Idle.
C10D_API void c10d_mpi_progress(void*);
// Goes on with the call from its stage for up to `ns`. kOk: done. kPending: call again. kMismatch: a rank has called
// something else. If that stands in a message which was left over, the caller puts the next message of that rank in its
// place and calls again (FlatExchange.again). kUsage: MPI failed.
C10D_API int c10d_leader_all_reduce(const c10d_custom::LeaderAllReduce*, c10d_custom::LeaderCall*, int64_t ns);
// What c10d_leader_fast_path returns beside a Status and kSlowPath.
constexpr int kDoneWake = 33;  // done, and somebody waits for the turn

// As c10d_fast_collective, of an all_reduce in place; the others take the slow path. kOk and kDoneWake: done. kPending,
// kMismatch and kUsage: as of c10d_leader_all_reduce with `now`; the turn is kept, and given back by
// c10d_leader_fast_path_over, once.
C10D_API int c10d_leader_fast_path(c10d_custom::LeaderFastPath*, uint64_t kind, int32_t root, void* in, void* out,
                                   uint64_t count, int64_t ns);
C10D_API int c10d_leader_fast_path_over(c10d_custom::LeaderFastPath*, int status);
// Writes up to `room` records, in no order. Returns how many.
C10D_API uint64_t c10d_leader_fast_path_log(const c10d_custom::LeaderFastPath*, c10d_custom::TraceRecord* out);
