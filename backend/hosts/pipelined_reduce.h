// What ring_pipelined_reduce (pipelined_reduce.cpp) needs to carry a reduction from host to host.
//
// MPI is known here only as two function pointers and opaque requests, as in hosts/leader_all_reduce.h. The requests
// are persistent, made by Python; each slot has those of a chunk of the usual length and those of the last, shorter
// one.
#pragma once
#include <cstdint>

#include "failure_news.h"

namespace c10d_custom {

// Transfers that go together. With more than two hosts there are two for each chunk: one in which each host gets its
// share of the partial results, and one in which it gives the sum of its share to all.
struct Phase {
  void* requests;
  uint64_t n;
};

// Where this rank's part of a chunk is, from its sum over the host's ranks until it is placed.
struct PipelinedSlot {
  char* mine;
  // A buffer for each other host, in their order. Of two hosts: for the other's whole sum of this rank's part; of more:
  // for what this host shares out to itself of it.
  char* const* theirs;
  Phase phases[2][2];  // of a usual chunk, of the last; each first and second
};

enum PipelinedEnd : uint32_t {
  kNone = 0,
  kLooked,    // `look` said so
  kLate,      // the deadline passed, with transfers of `slot` under way
  kTransfer,  // MPI failed
};

struct PipelinedReduce {
  int (*startall)(int, void*);
  int (*testall)(int, void*, int*, void*);
  void* statuses;        // room for one of any MPI for each request
  int (*look)();         // asked now and then while transfers are awaited; not 0: give up
  int64_t later_ns;      // by how much waits for this host's ranks outlast those for others
  uint64_t chunk;        // bytes of a chunk of the tensor, a multiple of 64
  const double* factor;  // between hosts; see reduce.h
  PipelinedSlot* slots;  // none: this rank is not among the first `carriers`, which carry the data
  uint32_t nslots, carriers;
  uint32_t hosts, own;  // how many; this one
  uint32_t op;          // reduce op between them
  uint32_t keeps;       // whether this host gets the result
  // Why the core gave up by itself, with kAborted and without a word to the other ranks: that is for the caller.
  uint32_t end, slot;
  const FailureNews* failure_news;  // or null
};

}  // namespace c10d_custom
