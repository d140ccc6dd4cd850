// A small all_reduce over hosts. Each host's first rank, its leader, reduces the inputs of its host, which it finds on the
// board; exchanges the result with the other leaders; reduces again; and puts up what comes of it for its host.
//
// MPI is known here only as two function pointers and opaque requests: this code is linked with no MPI, and serves any.
// The messages are persistent requests that Python has made. Each begins with a Head.
#pragma once
#include "head.h"

#define C10D_API extern "C" __attribute__((visibility("default")))

namespace c10d_custom {

struct Direct {
  int (*startall)(int, void*);
  int (*testall)(int, void*, int*, void*);
  void* statuses;         // room for one of any MPI for each request
  void* idle;             // a request that is never fulfilled, to be tested for the sake of the others; or null
  void* board;
  uint64_t stride;        // bytes of one slot of it
  uint32_t ranks, local;  // of this host; this rank's place among them
  char* const* between;   // the messages with the hosts' results, in order; one is this host's own
  uint32_t nbetween, own_between;
};

struct DirectReduce {
  Head head;
  void* data;             // input and result; with no payload nothing is reduced: the ranks only agree to call alike
  const double* inside_factor;       // see reduce.h
  const double* between_factor;
  void* requests;                    // between hosts; the leaders have some
  uint32_t nrequests;
  uint32_t inside_op, between_op;    // reduce ops
  uint32_t stage;         // 0 to begin; advanced by c10d_direct_reduce: 1 while it waits for its host, 2 for others
  int32_t peer;           // kMismatch: the rank of the host whose call differs; in stage 2 the index of the message, among
                          // those received
};

// A request that is never fulfilled, to be tested for the sake of the others.
struct Idle {
  int (*testall)(int, void*, int*, void*);
  void* request;
  void* status;
};

}  // namespace c10d_custom

// Lets MPI make progress. The context is an Idle.
C10D_API void c10d_mpi_progress(void*);
// Goes on with the call from its stage for up to `ns`. kOk: done. kPending: call again. kMismatch: a rank has called
// something else; where a message says so, with the right one in its place, call again. kUsage: MPI failed.
C10D_API int c10d_direct_reduce(const c10d_custom::Direct*, c10d_custom::DirectReduce*, int64_t ns);
