// A small all_reduce as one message from each rank to each other over MPI, which this code knows only as
// two function pointers and opaque requests: it is linked with no MPI, and serves any.
//
// The messages are persistent requests that Python has made: receives into `slots`, sends from the
// own one. A slot is a Head and the payload behind it.
#pragma once
#include <cstdint>

#define C10D_API extern "C" __attribute__((visibility("default")))

namespace c10d_custom {

struct Head {
  // Equal on all ranks, or they have called different things.
  uint64_t number;
  uint32_t op, redop, dtype;
  int32_t root;
  uint64_t count;
  // This rank's own.
  uint64_t payload;  // bytes
  double factor;
  uint64_t reserved[2];
};
static_assert(sizeof(Head) == 64, "direct.py packs the same");

struct Direct {
  int (*startall)(int, void*);
  int (*testall)(int, void*, int*, void*);
  void* statuses;        // room for one of any MPI for each request
  uint32_t ranks, me, hosts, reserved;
  char* const* slots;    // of each rank
  const uint32_t* members;       // the ranks of the first host, of the second, ...
  const uint32_t* member_counts; // one for each host
  char* const* partials;         // for each host, room for a payload
};

struct DirectReduce {
  Head head;
  void* data;            // input and result
  uint32_t inside, between;          // reduce ops: in the hosts, between them
  const double* inside_factor;       // see reduce.h
  const double* between_factor;
  void* requests;        // receives, then sends
  uint32_t nrequests, reserved;
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
// Starts the messages and waits up to `ns`. kOk: done. kPending: go on waiting, then call finish.
// kMismatch: *peer called something else. kUsage: MPI failed.
C10D_API int c10d_direct_reduce(const c10d_custom::Direct*, const c10d_custom::DirectReduce*, int64_t ns, int32_t* peer);
C10D_API int c10d_direct_finish(const c10d_custom::Direct*, const c10d_custom::DirectReduce*, int32_t* peer);
