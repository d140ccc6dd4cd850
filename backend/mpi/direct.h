// A small all_reduce over MPI, which this code knows only as two function pointers and opaque requests:
// it is linked with no MPI, and serves any.
//
// A rank exchanges its input with the ranks of its host, reduces, exchanges the host's result with other hosts, reduces
// again; or only some ranks do, the leaders, to which the others send their inputs, and which hand out the result. The
// messages are persistent requests that Python has made. Each begins with a Head.
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
  char* const* inside;    // the messages of the host's other ranks, in order; or the leader's, with the result
  char* const* between;   // the messages with the hosts' results, in order; one is this host's own
  char* out;              // the message with this rank's input, or, of a leader, with the result
  uint32_t ninside, nbetween, own_inside, own_between;
  uint32_t leads;         // or has a leader
};

struct DirectReduce {
  Head head;
  void* data;             // input and result
  const double* inside_factor;       // see reduce.h
  const double* between_factor;
  // Inside the host, between hosts, and for handing out the result. Who has a leader has the first alone.
  void* requests[3];
  uint32_t nrequests[3];
  uint32_t inside_op, between_op;    // reduce ops
  uint32_t stage;         // 0 to begin; advanced by c10d_direct_reduce; of the requests n: 2n + 1 and 2n + 2
  int32_t peer;           // kMismatch: the index of the message that differs, among those received in its round
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
