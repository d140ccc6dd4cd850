// A small all_reduce over MPI, which this code knows only as two function pointers and opaque requests:
// it is linked with no MPI, and serves any.
//
// As recursive doubling does it, in two rounds: each rank exchanges its input with the ranks of its
// host, and then its host's result with one rank of each other host. The messages are persistent
// requests that Python has made. Each begins with a Head.
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
static_assert(sizeof(Head) == 64, "native.py has the same");

struct Direct {
  int (*startall)(int, void*);
  int (*testall)(int, void*, int*, void*);
  void* statuses;         // room for one of any MPI for each request
  char* const* inside;    // the messages of this host's ranks, in order; one is this rank's own
  char* const* between;   // the messages with the hosts' results, in order; one is this host's
  uint32_t ninside, nbetween, own_inside, own_between;
};

struct DirectReduce {
  Head head;
  void* data;             // input and result
  const double* inside_factor;       // see reduce.h
  const double* between_factor;
  void* inside_requests;
  void* between_requests;
  uint32_t inside_op, between_op;    // reduce ops
  uint32_t ninside_requests, nbetween_requests;
  uint32_t stage;         // 0 to begin; advanced by c10d_direct_reduce
  int32_t peer;           // kMismatch: the index of the message that differs, in its round
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
// Goes on with the call from its stage for up to `ns`. kOk: done. kPending: call again. kMismatch: a
// message belongs to another call; with the right one in its place, call again. kUsage: MPI failed.
C10D_API int c10d_direct_reduce(const c10d_custom::Direct*, c10d_custom::DirectReduce*, int64_t ns);
